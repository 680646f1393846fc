"""A loop of verl's training engine on isograd, on random text: verl's own loss, on GPUs and on CPUs.

    torchrun --nproc-per-node 2 examples/integrations/verl_loop.py

verl finds the backend by its entry point. The loss is the mean over all tokens of a step that count, on any number of
ranks, at any ZeRO stage.
"""

import os
import tempfile
from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

from isograd.integrations.verl import EngineOptions

VOCAB, LONGEST = 101, 24
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
ENGINE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}


def batch(step):
    """This rank's share of 8 texts of all lengths; the first tokens of each are a prompt."""
    generator = torch.Generator().manual_seed(step)
    rows = []
    for length in torch.randint(4, LONGEST, (8,), generator=generator).tolist():
        prompt = torch.randint(1, length, (1,), generator=generator)
        rows.append((torch.randint(VOCAB, (length,), generator=generator), (torch.arange(length) >= prompt).long()))
    mine = rows[RANK::RANKS]
    tokens, masks = (torch.nested.as_nested_tensor([row[i] for row in mine], layout=torch.jagged) for i in (0, 1))
    return tu.get_tensordict({"input_ids": tokens, "loss_mask": masks}, ENGINE)


def main():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(config).save_pretrained(folder)
        engine = EngineRegistry.new(
            "language_model",
            "isograd",
            HFModelConfig(path=folder, load_tokenizer=False, override_config={"attn_implementation": "eager"}),
            EngineOptions(layout="zero1", **ENGINE),
            FSDPOptimizerConfig(lr=1e-2, clip_grad=1.0, lr_warmup_steps=2),
            CheckpointConfig(),
        )
        engine.initialize()
    for step in range(12):
        with engine.train_mode():
            output = engine.train_batch(batch(step), partial(sft_loss, None))
            rate = engine.lr_scheduler_step()
        if RANK == 0:
            print(f"step {step}: gradient norm {output['metrics']['grad_norm']:.4f}, next rate {rate:.4f}")


if __name__ == "__main__":
    main()
