"""Whole swarms that train a Hugging Face decoder: shipped programs from run file to a directory that others load."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.hf_runs import config_of, model_section, pretrained
from support.process_swarm import SWARM_TEST, ProcessSwarm, process_swarm

from atoll.node.model.run_model import run_model
from atoll.node.state.checkpoint import read_checkpoint

pytestmark = [
    *SWARM_TEST,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BIN = Path(sys.executable).parent


async def trained(swarm: ProcessSwarm, model: str, *flags: str) -> None:
    """Two nodes, to the end."""
    await swarm.begin(nodes=2, tokens=6_000, round_tokens=1_000, codec="int8", model=model)
    for name in ("ann", "bob"):
        await swarm.node(name, 0.01, *flags)
    for name in ("ann", "bob"):
        await swarm.reach(name, "finished")
    assert swarm.anchor_digest("ann") == swarm.anchor_digest("bob")
    run = (await swarm.json("run", "show", "reef"))["run"]
    assert run["rounds_committed"] >= 3
    losses = [item["loss"] for item in run["evaluations"]]
    assert losses[-1] < losses[0]


async def exported(swarm: ProcessSwarm, to: Path, *flags: str) -> None:
    command = [BIN / "atoll", "export", "--data-dir", swarm.root / "ann", "--to", to, *flags]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


async def test_two_nodes_train_a_llama_that_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    config = config_of("llama", max_position_embeddings=64)
    async with process_swarm(tmp_path) as swarm:
        await trained(swarm, model_section(config))
        await exported(swarm, tmp_path / "out")
        whole = read_checkpoint(Path(swarm.status("ann")["anchor"]).parent)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    run = run_model(whole.spec, 256)
    first = run.table.layers[0].parameters
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding.detach().flatten(), whole.anchor_E[:first])
    assert model.config.atoll["committed_tokens"] == whole.head.committed_tokens >= 6_000


@pytest.mark.soak
async def test_two_nodes_train_adapters_on_a_base_that_each_has(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = pretrained(tmp_path / "base")
    async with process_swarm(tmp_path) as swarm:
        await trained(swarm, model_section(config_of("llama"), base, ["q_proj", "v_proj"]), "--base", str(base))
        await exported(swarm, tmp_path / "adapter")
        await exported(swarm, tmp_path / "merged", "--base", str(base))
    plain, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (base, tmp_path / "merged"))
    tokens_BT = torch.arange(32).view(1, 32)
    with torch.no_grad():
        before = plain(tokens_BT).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter")(tokens_BT).logits
        assert torch.allclose(adapted, merged(tokens_BT).logits, atol=1e-4)
    assert not torch.allclose(adapted, before, atol=1e-4)
