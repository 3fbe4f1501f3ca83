"""What is mounted where on this machine, and what a mount takes of it."""
