"""Utilisation is of the roofline of the GPU that ran; of an unknown GPU there is none."""

import pytest

from experts.data_sheets import H200, H200_REACHED, SHEETS, describe_sheet, find_sheet


def test_the_name_of_the_device_decides() -> None:
    sheet = find_sheet("NVIDIA H200")
    assert sheet is not None
    assert sheet.by_name == {"data_sheet": H200, "reached": H200_REACHED}
    other = find_sheet("NVIDIA A100-SXM4-80GB")
    assert other is not None
    assert set(other.by_name) == {"data_sheet"}, "nobody has collected what was reached there"
    assert other.rates.fp8 == other.rates.attention, "Ampere multiplies widened numbers"


@pytest.mark.parametrize("name", ["NVIDIA H200 MIG 1g.18gb", "NVIDIA B300", "CPU", ""])
def test_an_unknown_device_has_no_sheet(name: str) -> None:
    assert find_sheet(name) is None
    assert describe_sheet(name)["why"] == f"no data sheet for {name}"


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_rates_are_in_the_units_of_bounds(name: str) -> None:
    sheet = SHEETS[name]
    rates = sheet.rates
    assert 1e14 < rates.attention <= rates.fp8 <= 2 * 1e15
    assert rates.fp8 <= 2.1 * rates.attention, "FP8 is at most twice bfloat16: no sparse figures"
    assert 5e11 < rates.memory < 5e12
    assert 3e10 < rates.link <= 4.5e11
    assert sheet.source
    assert describe_sheet(name) == {"device": name, "source": sheet.source, "why": None}
