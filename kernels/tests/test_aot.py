"""Every kernel compiles for three generations of GPUs without spilling; needs no GPU, only a
process of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from mtrain_kernels import aot, compiled, sass
from mtrain_kernels.aot import Row, table
from mtrain_kernels.registry import ops


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "variants"),
    [(90, False), *(pytest.param(arch, True, marks=pytest.mark.full) for arch in (80, 90, 100))],
)
def test_aot_every_kernel_compiles_without_spilling(
    compilation: dict[str, Any], arch: int, variants: bool
) -> None:
    """Compile the first variant of each kernel, or all of them with `variants`."""
    rows = [row for row in (Row(**row) for row in compilation["rows"]) if row.arch == arch]
    print(table(rows))
    assert compilation["faults"] == []
    assert arch not in compiled.ARCHS or compiled.worse(rows, compilation["triton"]) == []
    assert {row.op for row in rows} == {
        name for name, op in ops().items() if "triton" in op.implementations and op.oldest <= arch
    }


def test_aot_spill_and_shared_memory_are_faults() -> None:
    row = Row("norm", "tiny", "kernel", 80, 4, 255, 200 * 1024, 16)
    assert len(row.faults()) == 2
    assert Row("norm", "tiny", "kernel", 90, 4, 255, 200 * 1024, 0).faults() == []


def test_aot_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrain_kernels.runtime.interpreted", lambda: True)
    with pytest.raises(RuntimeError, match="without TRITON_INTERPRET"):
        aot.compile_op("norm", "tiny", 90)


OLDEST = Path(__file__).resolve().parents[2] / ".triton-3.6"


@pytest.mark.full
def test_aot_oldest_triton_compiles_without_spilling() -> None:
    assert OLDEST.exists(), "make .triton-3.6 fetches the oldest Triton that is admitted"
    found = compiled.compile_apart((90,), triton=OLDEST)
    assert found["triton"].startswith("3.6.")
    assert found["faults"] == []
    assert compiled.worse([Row(**row) for row in found["rows"]], found["triton"]) == []


def test_aot_regressions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("norm", "tiny", "kernel", 90, 4, 60, 0, 0, {"128": 4}, 100, 200)
    monkeypatch.setattr(compiled, "RECORD", tmp_path / "compiled.json")
    compiled.RECORD.write_text(json.dumps({"3.9": {compiled.name_of(row): compiled.numbers(row)}}))
    assert compiled.worse([row], "3.9") == []
    changes: list[dict[str, Any]] = [
        {"registers": 70},
        {"spill_bytes": 4},
        {"issue": 110},
        {"variant": 1},
    ]
    for change in (*changes, {"accesses": {"128": 4, "16": 4}}):
        assert len(compiled.worse([replace(row, **change)], "3.9")) == 1, change
    assert compiled.worse([replace(row, registers=70)], "3.10") == []


def test_aot_recorded_kernels_do_not_spill() -> None:
    """Expect no spills, and no streams that read 16 bits per lane: 5% of the bytes are scalars of a
    row or a tile.
    """
    record = json.loads(compiled.RECORD.read_text())
    shown = (
        compiled.README.read_text().partition(compiled.MARKS[0])[2].partition(compiled.MARKS[1])[0]
    )
    assert shown.count("\n") - 3 == sum(name.endswith("/sm_90") for name in record["3.9.0"])
    streaming = (
        "activation",
        "cross_entropy",
        "linear_cross_entropy",
        "norm",
        "optimizer",
        "quantize",
    )
    for kernels in record.values():
        for name, numbers in kernels.items():
            assert numbers["spilled"] <= (
                16 if "wide_backward" in name and name.endswith("sm_100") else 0
            ), name
            # a byte of scale a block, loaded for each thread
            bound = 0.25 if "dequantize" in name else 0.05
            assert numbers["narrow"] <= bound or not name.startswith(streaming), (
                name,
                numbers["narrow"],
            )


def test_aot_tile_is_its_loop_over_memory() -> None:
    lines = [
        "LDC R1, c[0x0]",
        "LDG.E.64 R2, [R1]",
        "@!P0 EXIT",
        "LDG.E.128 R4, [R2]",
        "MUFU.EX2 R4, R4",
    ]
    lines += ["STG.E.128 [R2], R4", "@P0 BRA `(.L_x_1)", "EXIT", "BRA `(.L_x_2)"]
    text = [f"        /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines)]
    text.insert(3, ".L_x_1:")
    text.insert(9, ".L_x_2:")
    assert [name for name, _ in sass.tile_of("\n".join(text))] == [
        "LDG.E.128",
        "MUFU.EX2",
        "STG.E.128",
        "BRA",
    ]
    assert len(sass.tile_of("\n".join(text).replace("x_1)", "x_9)"))) == 8
    ttgir = "%0 = tt.load %1 : !tt.ptr<i64> loc(#a)\nscf.for %i = %a to %b step %c : i32 {\n"
    ttgir += (
        "%2 = tt.load %3, %4 : tensor<2x8x!tt.ptr<bf16>, #b>\n%5 = tt.load %3 {isVolatile ="
        " true} : "
    )
    ttgir += "tensor<8x!tt.ptr<f32>, #b>\ntt.store %3, %2 : tensor<4x!tt.ptr<i8>, #b>\n}\n"
    assert sass.tile_bytes(ttgir) == (36, 32, True)
    assert sass.tile_bytes(ttgir.replace("scf.for", "scf.if")) == (44, 32, False)
    newer = "{cachePolicy = #tt.cache_policy<cache_modifier = none, eviction_policy = evict_first>}"
    for said in ("{isVolatile = true}", "evictionPolicy = 2 : i32", newer):
        assert sass.tile_bytes(f"%x = tt.load %p {said} : tensor<4x!tt.ptr<f32>>") == (0, 16, False)


def test_aot_occupancy_follows_lanes() -> None:
    """Count cycles of 100 instructions of 4 warps: 100 to issue them, and more if a unit has fewer
    lanes.
    """
    for name, cycles in (
        ("FFMA", 100),
        ("IADD3", 200),
        ("IMAD.WIDE", 200),
        ("FFMA2", 200),
        ("MUFU.EX2", 800),
        ("F2F.BF16.F32", 800),
        ("FCHK", 800),
        ("FRND.FLOOR", 800),
        ("FSET.BF.NEU.AND", 200),
        ("F2FP.BF16.F32.PACK_AB", 200),
        ("REDUX.MAX.S32", 800),
        ("SHFL.BFLY", 400),
        ("LDS", 400),
        ("LDS.128", 1600),
        ("LDSM.16.M88", 400),
        ("STSM.16.MT88.2", 800),
        ("LDSM.16.M88.4", 1600),
        ("LDG.E.64", 800),
    ):
        assert sass._issue([(name, "")] * 100, 4) == cycles, name
    assert sass._issue([("IADD3", ""), ("IMAD", "")] * 100, 4) == 200  # two pipes, side by side
    assert sass._issue([("IADD3", ""), ("PRMT", "")] * 100, 4) == 400
    assert sass._issue([("FFMA2", ""), ("FFMA", "")] * 100, 4) == 300  # the same lanes
    assert sass._issue([("FMUL2", ""), ("IMAD", "")] * 100, 4) == 300


def test_aot_rows_of_one_op_are_replaced_only() -> None:
    before, now = (
        compiled.table(
            [Row(op, "tiny", "kernel", 90, 4, registers, 0, 0, {128: 4}, 1, 2) for op in ops]
        )
        for ops, registers in ((("norm", "rope", "ssd"), 60), (("rope",), 50))
    )
    lines = compiled.merged(before, now, ["rope"]).splitlines()
    assert lines[:3] + lines[4:] == before.splitlines()[:3] + before.splitlines()[4:]
    assert lines[3] == now.splitlines()[2] != before.splitlines()[3]
    assert compiled.merged(before, now, []) == now
