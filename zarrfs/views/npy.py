"""Arrays as files of numpy: which can be, and headers of .npy files, made by numpy itself.

Source: numpy.lib.format, "Format version 1.0" and 2.0.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np

from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.model import ArrayMetadata

if TYPE_CHECKING:
    from zarrfs.zarr.dtypes import DataType


_SIZE_MAX = 2**63 - 1 - (1 << 20)  # bytes of a file, less a header


def flat_size(array: ArrayMetadata) -> int:
    """Bytes of all items. MetadataError where a flat file cannot have them, or numpy no such array."""
    if not array.dtype.itemsize:
        raise MetadataError(f"dtype {array.dtype.text}: its items have no fixed size")
    try:
        np.empty((0,) * array.ndim)
    except ValueError:
        raise MetadataError(f"shape: numpy has no arrays of {array.ndim} dimensions") from None
    size = array.dtype.itemsize * math.prod(array.shape)
    if size > _SIZE_MAX:
        raise MetadataError(f"shape {array.shape}: larger than any file")
    return size


def npy_header(shape: tuple[int, ...], dtype: DataType, fortran: bool) -> bytes:
    """What comes before the items in a .npy file; 128 bytes, but for long shapes and data types with many fields.

    MetadataError where a .npy file cannot say it.
    """
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
