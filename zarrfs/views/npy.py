"""Headers of .npy files, made by numpy itself. Source: numpy.lib.format, "Format version 1.0" and 2.0."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from zarrfs.zarr.model import MetadataError

if TYPE_CHECKING:
    from zarrfs.zarr.dtypes import DataType


def npy_header(shape: tuple[int, ...], dtype: DataType, fortran: bool) -> bytes:
    """What comes before the items in a .npy file; 128 bytes, but for long shapes and data types with many fields.

    MetadataError where a .npy file cannot say it.
    """
    if not dtype.itemsize:
        raise MetadataError(f"dtype {dtype.text}: its items have no fixed size")
    described = np.lib.format.dtype_to_descr(dtype.numpy())
    if np.lib.format.descr_to_dtype(described) != dtype.numpy():
        raise MetadataError(f"dtype {dtype.text}: numpy cannot write it to a .npy file")
    contents = {"descr": described, "fortran_order": fortran, "shape": shape}
    header = io.BytesIO()
    try:
        try:
            np.lib.format.write_array_header_1_0(header, contents)
        except ValueError:  # longer than 65535 bytes
            header = io.BytesIO()
            np.lib.format.write_array_header_2_0(header, contents)
    except UnicodeEncodeError:
        raise MetadataError(f"dtype {dtype.text}: names of fields that are not Latin-1") from None
    return header.getvalue()
