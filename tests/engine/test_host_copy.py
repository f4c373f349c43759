"""Packing for the one copy to the device: what comes out is what went in, wherever it lies."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.host_copy import HostCopies, pack, unpack, upload

DTYPES = (np.dtype("int64"), np.dtype("int32"), np.dtype("float32"), np.dtype("bool"))

arrays_of_all_kinds = st.lists(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(
            dtype,
            hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=7),
            elements=None if dtype.kind != "f" else st.floats(-10, 10, width=32),
        )
    ),
    max_size=6,
)


@given(arrays_of_all_kinds)
@settings(max_examples=60, deadline=None)
def test_unpacking_gives_back_the_arrays(arrays: list[np.ndarray]) -> None:
    for array, tensor in zip(arrays, unpack(pack(arrays), arrays), strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % array.itemsize == 0
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_strided_array_is_packed_in_its_own_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    assert unpack(pack([array]), [array])[0].tolist() == [[0, 2], [4, 6], [8, 10]]


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(3)
    (tensor,) = upload([array], "cpu")
    assert tensor.data_ptr() == array.ctypes.data
    copies = HostCopies(torch.device("cpu"))
    assert copies.add(tensor) is tensor
    copies.close()
    assert copies.is_done
    copies.wait()
