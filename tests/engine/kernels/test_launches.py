"""Launches are dependent where a Hopper GPU is asked for them, of both kinds, and only inside."""

import sys
from types import SimpleNamespace

import pytest
import torch

from engine.formats import deep_gemm
from engine.kernels.fused.dependent import joins_chain
from engine.kernels.launches import (
    SIDE_MULTIPROCESSORS,
    choose_launches,
    choose_side_launches,
)

CUDA = torch.device("cuda")


class Library(SimpleNamespace):
    """What DeepGEMM has for it."""

    is_dependent = False
    num_sms = 132

    def get_num_sms(self) -> int:
        return self.num_sms

    def set_num_sms(self, number: int) -> None:
        self.num_sms = number

    def get_pdl(self) -> bool:
        return self.is_dependent

    def set_pdl(self, is_dependent: bool) -> None:
        self.is_dependent = is_dependent


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(deep_gemm, "is_available", lambda: True)
    library = Library()
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    return library


def test_a_block_is_of_our_kernels_and_of_the_librarys(library: Library) -> None:
    launches = choose_launches(CUDA, are_dependent=True)
    for _ in range(2):
        with launches():
            assert (library.is_dependent, joins_chain()) == (True, True)
        assert (library.is_dependent, joins_chain()) == (False, False)


def test_a_step_that_fails_leaves_launches_as_they_were(library: Library) -> None:
    launches = choose_launches(CUDA, are_dependent=True)
    with pytest.raises(ZeroDivisionError), launches():
        raise ZeroDivisionError
    assert (library.is_dependent, joins_chain()) == (False, False)


@pytest.mark.parametrize(
    ("device", "are_dependent", "is_available"),
    [("cuda", False, True), ("cuda", True, False), ("cpu", True, True)],
)
def test_otherwise_launches_are_ordinary(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    are_dependent: bool,
    is_available: bool,
) -> None:
    monkeypatch.setattr(deep_gemm, "is_available", lambda: is_available)
    with choose_launches(torch.device(device), are_dependent=are_dependent)():
        assert (library.is_dependent, joins_chain()) == (False, False)


@pytest.mark.parametrize("num_sms", [132, 60])
def test_a_side_stream_s_products_leave_room_and_come_behind_what_they_wait_for(
    library: Library, num_sms: int
) -> None:
    library.num_sms = num_sms
    with choose_launches(CUDA, are_dependent=True)():
        for _ in range(2):
            with choose_side_launches(CUDA)():
                assert (library.is_dependent, joins_chain()) == (False, False)
                assert library.num_sms == min(num_sms, SIDE_MULTIPROCESSORS)
            assert (library.is_dependent, joins_chain()) == (True, True)
            assert library.num_sms == num_sms


def test_elsewhere_a_side_stream_s_launches_are_those_of_all_else(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_gemm, "is_available", lambda: False)
    with choose_side_launches(CUDA)():
        assert library.num_sms == 132
