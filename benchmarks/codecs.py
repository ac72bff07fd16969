"""Codecs: speed on one core, size, and error on a vector like a pseudo-gradient."""

from __future__ import annotations

import torch

from atoll.node.exchange.codecs import CODECS
from benchmarks.common import Report, median_seconds

ELEMENTS = 4 * 1024 * 1024
INT4_ERROR = 0.15  # root of mean squared error over root mean square, Gaussian values, 128-element blocks


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = torch.randn(ELEMENTS) * torch.logspace(-6, -2, ELEMENTS // 128).repeat_interleave(128)
    megabytes = 4 * ELEMENTS / 1e6
    report = Report("codecs")
    copy_seconds = median_seconds(lambda: values.clone())
    report.cell(
        codec="memory copy",
        encode_mb_per_second=megabytes / copy_seconds,
        decode_mb_per_second=0.0,
        smaller_than_fp32=1.0,
        relative_error=0.0,
    )
    for name, codec in CODECS.items():
        body = codec.encode(values)
        scale = values.view(-1, 128).square().mean(dim=1).sqrt()
        error = (codec.decode(body, ELEMENTS) - values).view(-1, 128).square().mean(dim=1).sqrt()
        relative = float((error / scale).mean())
        report.cell(
            codec=name,
            encode_mb_per_second=megabytes / median_seconds(lambda codec=codec: codec.encode(values)),
            decode_mb_per_second=megabytes
            / median_seconds(lambda codec=codec, body=body: codec.decode(body, ELEMENTS)),
            smaller_than_fp32=4 * ELEMENTS / len(body),
            relative_error=relative,
        )
        if name == "int4":
            report.accept(
                "int4 is 7.7 times smaller",
                target="≥ 7.7",
                value=4 * ELEMENTS / len(body),
                holds=4 * ELEMENTS / len(body) >= 7.7,
            )
            report.accept("int4 relative error", target=f"≤ {INT4_ERROR}", value=relative, holds=relative <= INT4_ERROR)
    report.finish(
        "MB are of fp32; one thread; the error is per 128-element block, averaged over blocks of scales 1e-6 to 1e-2"
    )


if __name__ == "__main__":
    main()
