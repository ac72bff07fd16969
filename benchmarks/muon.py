"""What Muon's step takes on a CPU: ours in fp32, beside `torch.optim.Muon`, which multiplies in bf16 everywhere.

    python -m benchmarks.muon [--threads N]

Matrices of one block of the presets' widths. The physical limit is the time of the same products in fp32 alone. On a
processor with bf16 units (AMX, AVX512_BF16) torch's may be the faster; the machine's flags are in the notes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.training.stacked_muon import StackedMuon
from benchmarks.common import Report, median_seconds

BLOCKS = {  # by width: the attention's matrices, and three of the hidden layer
    128: [(128, 128)] * 4 + [(344, 128)] * 2 + [(128, 344)],
    256: [(256, 256)] * 4 + [(688, 256)] * 2 + [(256, 688)],
    512: [(512, 512)] * 4 + [(1376, 512)] * 2 + [(512, 1376)],
}
ITERATIONS = 5
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="of torch; all cores unless named")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    report, ratios = Report("muon"), []
    for width, shapes in BLOCKS.items():
        mine = median_seconds(_step(StackedMuon, shapes), 3)
        theirs = median_seconds(_step(torch.optim.Muon, shapes), 3)
        limit = median_seconds(lambda shapes=shapes: _products(shapes), 3)
        ratios.append(mine / theirs)
        report.cell(
            width=width,
            matrices=len(shapes),
            ours_ms=round(1e3 * mine, 1),
            torch_ms=round(1e3 * theirs, 1),
            products_ms=round(1e3 * limit, 1),
            ours_over_torch=round(mine / theirs, 3),
            ours_over_limit=round(mine / limit, 2),
        )
    report.accept(
        "a block's step ÷ torch.optim.Muon's, worst width",
        target="≤ 1 without bf16 units, ≤ 3 with",
        value=round(max(ratios), 3),
        holds=max(ratios) <= (3 if _bf16_flags() else 1),
    )
    report.finish(f"{torch.get_num_threads()} threads; bf16 units: {', '.join(_bf16_flags()) or 'none'}.")


def _step(kind: type[torch.optim.Muon], shapes: list[tuple[int, int]]) -> Callable[[], object]:
    """Make a function that steps the matrices once."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.randn(matrix.shape, generator=generator)
    return kind(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw").step


def _products(shapes: list[tuple[int, int]]) -> None:
    """The iterations' products alone."""
    for shape in shapes:
        x_MN: Tensor = torch.ones(min(shape), max(shape))
        for _ in range(ITERATIONS):
            gram_MM = x_MN @ x_MN.mT
            gram_MM @ gram_MM @ x_MN


def _bf16_flags() -> list[str]:
    path = Path("/proc/cpuinfo")
    words = set(path.read_text().split()) if path.exists() else set()
    return [flag for flag in BF16_FLAGS if flag in words]


if __name__ == "__main__":
    main()
