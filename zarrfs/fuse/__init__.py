"""The FUSE daemon: kernel requests become calls on a Store."""
