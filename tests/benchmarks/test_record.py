from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import drivers
import picture
import record
import report
import works
from moments import POLICIES, moments, same
from record import Cancels, Cost, Record
from trionnx.cli.inputs import UsageError


@pytest.fixture
def cancels() -> Cancels:
    left_s = [0.001 * count for count in range(1, 101)]
    return Cancels("default", 0.005, 2, left_s, left_s, 3, 0, 2, 0, 21, 0, 0.25, 40)


@pytest.fixture
def made(cancels: Cancels) -> Record:
    named = ("default", 0.005), ("20ms", 0.02)
    costs = [Cost(name, s, 1, 0.01, [0.1] * 4, [1.0, 1.02, 1.04, 1.06]) for name, s in named]
    return Record("products", "webgpu", "llvmpipe (software)", 1.0, 0.02, 0.004, 0.006, [cancels], costs)


def test_the_bound_follows_the_interval(cancels: Cancels) -> None:
    assert cancels.bound_s == pytest.approx(0.025)
    assert replace(cancels, interval_s=0.05).bound_s == pytest.approx(0.115)
    assert replace(cancels, interval_s=None).bound_s is None


def test_quantiles_are_of_the_cancels(cancels: Cancels) -> None:
    assert [cancels.left(share) for share in (0.5, 0.99, 1.0)] == pytest.approx([0.05, 0.099, 0.1])


def test_what_is_missed_is_said(cancels: Cancels) -> None:
    assert cancels.misses() == ["p99 99.0 ms, and 25 ms are the bound"]
    assert replace(cancels, interval_s=0.042).misses() == []
    assert replace(cancels, interval_s=None, limit=None, after=9).misses() == []
    assert replace(cancels, interval_s=0.05, after=3).misses() == ["3 segments finished after a cancel"]


def test_what_is_wrong_is_said(cancels: Cancels) -> None:
    assert cancels.faults() == []
    assert replace(cancels, late=1).faults() == ["1 segments were handed over after a cancel"]
    assert replace(cancels, different=2).faults() == ["2 of 21 outputs were not the same"]
    assert replace(cancels, miscounted=1).faults() == ["in 1 runs the device did not count what was submitted"]
    assert replace(cancels, miscounted=None).faults() == []
    assert replace(cancels, left_s=[]).faults() == ["every run was over before it could be cancelled"]


@pytest.mark.parametrize(
    ("interval_s", "cuts", "aim"), [(0.005, 0, 0.03), (0.005, 2, 0.15), (0.02, 0, 0.05), (0.02, 2, 0.05)]
)
def test_what_checkpoints_may_cost(interval_s: float, cuts: int, aim: float) -> None:
    cost = Cost("any", interval_s, cuts, 0.01, [1.0] * 3, [1 + aim - 0.01] * 3)
    assert cost.aim == aim
    assert cost.misses() == []
    assert len(replace(cost, ratios=[1 + aim + 0.01] * 3).misses()) == 1


def test_quartiles() -> None:
    cost = Cost("any", 0.005, 0, 0.01, [1.0] * 5, [1.0, 1.04, 1.01, 1.03, 1.02])
    assert cost.quartiles == pytest.approx((0.01, 0.02, 0.03))
    assert replace(cost, ratios=[1.5]).quartiles == pytest.approx((0.5, 0.5, 0.5))


def test_records_go_to_json_and_back(made: Record, tmp_path: Path) -> None:
    newer = replace(made, load_s=2.0)
    other = replace(made, adapter="another", cancels=[], costs=[])
    text = record.save([made, other, newer], tmp_path / "r.json")
    assert record.load([tmp_path / "r.json"]) == [newer, other]
    assert json.loads(text)[0]["load_s"] == 2.0
    (tmp_path / "r.json").write_text("[{}]")
    with pytest.raises(ValueError, match="holds no records"):
        record.load([tmp_path / "r.json"])


def test_a_record_names_its_driver_and_what_is_amiss(made: Record) -> None:
    assert made.driver == "lavapipe"
    assert made.faults() == []
    assert made.misses() == ["products on lavapipe, default: p99 99.0 ms, and 25 ms are the bound"]
    assert replace(made, adapter="SwiftShader Device (LLVM)").driver == "SwiftShader"
    assert replace(made, adapter="Some GPU").driver == "Some GPU"


def test_moments_are_the_same_for_a_seed_and_spread_over_the_run() -> None:
    one, again, other = (list(islice(moments(seed), 400)) for seed in ("0", "0", "1"))
    assert one == again != other
    assert all(0 <= share < 1 for share in one)
    assert np.histogram(one, 4, (0, 1))[0].min() > 70


def test_outputs_are_compared_bit_for_bit() -> None:
    nan = np.array([np.nan, 0.0])
    assert same([nan], [nan.copy()])
    assert not same([np.array([0.0])], [np.array([-0.0])])
    assert not same([np.array([1], np.int32)], [np.array([1], np.uint32)])
    assert not same([np.zeros((1, 2))], [np.zeros((2, 1))])
    assert not same([nan], [nan, nan])


def test_sequences_maps_and_texts_are_compared_by_what_they_hold() -> None:
    def made(score: float = 0.5, label: str = "cat") -> list[object]:
        return [[{0: np.float32(score), 1: np.float32(1)}], np.array([label + "s"], object), None]

    assert same(made(), made())
    assert not same(made(), made(0.25))
    assert not same(made(), made(label="dog"))
    assert not same([{0: 1.0}], [{1: 1.0}])
    assert not same([None], [np.zeros(1)])


def test_the_policies_are_those_that_are_promised() -> None:
    assert list(POLICIES) == ["default", "20ms", "50ms", "every_op", "unsplit"]
    assert [policy.split_into_checkpoints for policy in POLICIES.values()] == [True] * 4 + [False]
    assert [POLICIES[name].checkpoint_interval_s for name in ("default", "20ms", "50ms")] == [0.005, 0.02, 0.05]


def test_all_are_sixteen_models_and_a_product() -> None:
    names = works.names_of(["all", "opennsfw"])
    assert len(names) == len(set(names)) == 17
    assert names[-1] == works.MATMUL
    assert works.names_of(["x.onnx"], giants=True) == ["x.onnx", *works.GIANTS]
    with pytest.raises(UsageError, match="no known model"):
        works.work("nonsense")


def test_drivers_are_found_and_seen_alone(tmp_path: Path) -> None:
    assert drivers.software_drivers(tmp_path) == []
    for name in ("usr/share/vulkan/icd.d/lvp_icd.i686.json", "usr/share/vulkan/icd.d/lvp_icd.x86_64.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "usr/share/vulkan/icd.d/intel_icd.json").touch()
    (tmp_path / "usr/lib/chromium").mkdir(parents=True)
    (tmp_path / "usr/lib/chromium/vk_swiftshader_icd.json").touch()
    lavapipe, swiftshader = drivers.software_drivers(tmp_path)
    assert (lavapipe.name, len(lavapipe.files)) == ("lavapipe", 2)
    assert swiftshader.files == (tmp_path / "usr/lib/chromium/vk_swiftshader_icd.json",)
    around = {"VK_DRIVER_FILES": "other", "VK_ICD_FILENAMES": "other", "TRIONNX_ADAPTER": "1", "HOME": "h"}
    assert swiftshader.environment(around) == {"VK_ICD_FILENAMES": str(swiftshader.files[0]), "HOME": "h"}


def test_tables(made: Record) -> None:
    console = Console(width=240, record=True, file=io.StringIO())
    report.show([made], console)
    text = console.export_text()
    for part in ("missed", "2 of 2", "21 of 21 same", "50.0 ms", "99.0 ms", "+3.0%", "at most 15%", "at most 5%"):
        assert part in text


def test_the_picture_shows_what_was_measured(made: Record) -> None:
    image = picture.draw([made, replace(made, work="other"), replace(made, adapter="another")])
    colours = {colour for _, colour in image.getcolors(1 << 24) or []}
    assert (9, 105, 218) in colours
    plain = picture.draw([replace(made, costs=[])])
    assert plain.height < image.height
    assert plain.width < image.width
    moved = replace(made.cancels[0], left_s=[0.01] * 100)
    other = picture.draw([replace(made, costs=[], cancels=[moved])])
    assert isinstance(other, Image.Image)
    assert other.tobytes() != plain.tobytes()
