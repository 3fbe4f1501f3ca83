"""Data files (NetCDF, GRIB, TIFF, ...): detect them by their first bytes, so that errors can say what to do."""

from __future__ import annotations

from zarrfs.documents.compressed import is_tar

_FORMATS = {  # first bytes: (name, function that makes a reference set of the file)
    b"\x89HDF\r\n\x1a\n": ("a NetCDF-4 or HDF5 file", "kerchunk.hdf.SingleHdf5ToZarr"),
    b"CDF\x01": ("a NetCDF-3 file", "kerchunk.netCDF3.NetCDF3ToZarr"),
    b"CDF\x02": ("a NetCDF-3 file", "kerchunk.netCDF3.NetCDF3ToZarr"),
    b"CDF\x05": ("a NetCDF-3 file (CDF-5)", ""),
    b"\x0e\x03\x13\x01": ("an HDF4 file", "kerchunk.hdf4.HDF4ToZarr"),
    b"GRIB": ("a GRIB file", "kerchunk.grib2.scan_grib"),
    b"II*\0": ("a TIFF file", "kerchunk.tiff.tiff_to_zarr"),
    b"MM\0*": ("a TIFF file", "kerchunk.tiff.tiff_to_zarr"),
    b"II+\0": ("a TIFF file", "kerchunk.tiff.tiff_to_zarr"),  # BigTIFF
    b"MM\0+": ("a TIFF file", "kerchunk.tiff.tiff_to_zarr"),
    b"SIMPLE  =": ("a FITS file", "kerchunk.fits.process_file"),
}


def why_no_source(head: bytes) -> str | None:
    """Return why a data file that begins with `head` is no source, and what to do; None for other files."""
    if head.startswith(b"SQLite format 3\0"):
        return "is a database, and no source; of an index, mount the document that it was made of"
    for magic, (name, maker) in _FORMATS.items():
        if head.startswith(magic):
            remedy = f"make a reference set of it with {maker}" if maker else "convert it: nccopy -k nc4"
            return f"is {name}, and no source: {remedy} (docs/sources.md)"
    return "is a tar, and no source: extract it" if is_tar(head) else None
