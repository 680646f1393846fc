"""What other libraries' losses divide by, run: by how much a token of an uneven micro-batch counts too much.

notes/from-docs.md has the table. Two ranks with two micro-batches each; one completion has no token that counts. A
library's loss is compared with the step's own mean: the gradient of one micro-batch is that mean's times a factor.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.comm import raw, world
from isograd.core.mesh import Mesh

from . import toys
from .worlds import as_torchrun_starts_it

RANKS, MICROS, PROMPT, LONGEST = 2, 2, 3, 8
Place = tuple[int, int]  # rank, micro-batch
LENGTHS: dict[Place, tuple[int, ...]] = {(0, 0): (1, 2), (0, 1): (8, 5), (1, 0): (2, 0), (1, 1): (7, 1)}
TOKENS = sum(map(sum, LENGTHS.values()))
ROWS = sum(map(len, LENGTHS.values()))
SEQUENCES = sum(length > 0 for lengths in LENGTHS.values() for length in lengths)
OF_OTHER_STEPS = 51  # tokens of the same generation


def mask_of(place: Place) -> Tensor:
    return (torch.arange(LONGEST) < torch.tensor(LENGTHS[place])[:, None]).double()


def weights(place: Place, mean: str) -> Tensor:
    """Of each token in the step's mean, on one device."""
    mask = mask_of(place)
    return {
        "tokens": mask / TOKENS,
        "sequences": mask / mask.sum(1, keepdim=True).clamp(min=1) / SEQUENCES,
        "sums": mask / SEQUENCES,
        "length": mask / (ROWS * LONGEST),
    }[mean]


def of_means(place: Place, mean: str) -> float:
    """Of the mean over ranks and micro-batches of each one's own mean."""
    tokens, sequences = sum(LENGTHS[place]), sum(length > 0 for length in LENGTHS[place])
    n, whole = (tokens, TOKENS) if mean == "tokens" else (sequences, SEQUENCES)
    return whole / (RANKS * MICROS * n)


# -- TRL: its own training_step


def micro(place: Place, counts: bool, generated: int) -> dict[str, Tensor]:
    """As GRPOTrainer's generation makes it; its advantages are 1 where it `counts`, else 0."""
    draw = torch.Generator().manual_seed(7 * place[0] + place[1])
    rows = len(LENGTHS[place])
    return {
        "prompt_ids": torch.randint(3, toys.VOCAB, (rows, PROMPT), generator=draw),
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(3, toys.VOCAB, (rows, LONGEST), generator=draw),
        "completion_mask": mask_of(place).long(),
        "advantages": torch.full((rows,), float(counts)),
        "num_items_in_batch": torch.tensor(generated),
    }


def flat(model: Any) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def true(trainer: Any, place: Place, mean: str) -> Tensor:
    given = micro(place, True, TOKENS)
    ids, mask = (torch.cat([given[f"prompt_{n}"], given[f"completion_{n}"]], 1) for n in ("ids", "mask"))
    logp = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, LONGEST)[0]
    trainer.model.zero_grad()
    (-(logp * weights(place, mean)).sum()).backward()
    found = flat(trainer.model)
    trainer.model.zero_grad()
    return found


KINDS = {"grpo": "sequences", "bnpo": "tokens", "dr_grpo": "length", "dapo": "tokens", "dapo, 2 steps": "tokens"}


def factors() -> dict[str, dict[Place, float]]:
    from trl import GRPOConfig, GRPOTrainer

    from .test_trl import texts, tokenizer

    rank, ranks = world.world()
    found: dict[str, dict[Place, float]] = {}
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch:
        group = Mesh(f"dp{ranks}").group("world")
        for kind, mean in KINDS.items():
            steps = 2 if kind.endswith("steps") else 1  # of one generation
            arguments = GRPOConfig(
                output_dir=scratch, use_cpu=True, bf16=False, report_to="none", num_generations=2, beta=0.0,
                loss_type=kind.partition(",")[0], per_device_train_batch_size=2, gradient_accumulation_steps=MICROS,
                max_completion_length=LONGEST, steps_per_generation=steps * MICROS, gradient_checkpointing=False,
            )  # fmt: skip
            rows = texts("SFT").select_columns(["prompt"])
            made = GRPOTrainer(toys.model(), lambda *_, **__: [0.0], arguments, rows, processing_class=tokenizer())
            made.current_gradient_accumulation_steps = MICROS
            made._prepare_inputs = lambda inputs: inputs
            found[kind] = {}
            for place in LENGTHS:
                expected = true(made, place, mean)
                for number in range(MICROS):
                    mine = (rank, number)
                    given = micro(mine, mine == place, TOKENS + (steps - 1) * OF_OTHER_STEPS)
                    made.training_step(made.model, given, None)
                total = raw.all_reduce(flat(made.model), group) / ranks  # as DDP
                found[kind][place] = factor = float(total @ expected / (expected @ expected))
                # The parameters are in fp64; TRL's head takes log probabilities and their gradients in fp32, and the
                # two are rounded at other factors: 2e-7 of the norm was measured, a little above fp32's 1.2e-7.
                assert (total - factor * expected).norm() <= 1e-6 * total.norm()
                made.model.zero_grad()
    return found


@pytest.mark.slow
def test_a_token_of_grpo_trainer_counts_as_often_as_the_table_says(worlds) -> None:
    pytest.importorskip("trl")
    for found in worlds(RANKS).run(factors, timeout=280):
        for place in LENGTHS:
            off = {
                "grpo": SEQUENCES / ROWS,  # a completion without tokens is counted
                "bnpo": of_means(place, "tokens"),
                "dapo, 2 steps": TOKENS / ((TOKENS + OF_OTHER_STEPS) / 2),
            }
            for kind, of_places in found.items():
                assert of_places[place] == pytest.approx(off.get(kind, 1.0), rel=1e-6), (kind, place)  # fp32, too


# -- verl: its own ppo_loss, and the function that adds up its losses


def slopes(place: Place, mode: str) -> Tensor:
    """d loss / d log probability of each token, as FSDP averages it; the step's counts are told."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    lengths = [max(1, length) for length in LENGTHS[place]]  # what nothing counts of has a token, too

    def nested(value: float, ahead: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        parts = [torch.full((length + ahead,), value, dtype=dtype) for length in lengths]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    logp = torch.full((sum(lengths) + PROMPT * len(lengths),), -2.0, dtype=torch.float64, requires_grad=True)
    sequences = nested(0.0, PROMPT)
    masks = [mask_of(place)[row, :length].long() for row, length in enumerate(lengths)]
    prompts = torch.nested.as_nested_tensor([torch.zeros(PROMPT).long()] * len(lengths), layout=torch.jagged)
    tensors = {"prompts": prompts, "responses": nested(0, dtype=torch.long), "old_log_probs": nested(-2.0)}
    tensors |= {"advantages": nested(-1.0)}
    tensors["response_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    told = {"dp_size": RANKS, "batch_num_tokens": TOKENS, "global_batch_size": ROWS}
    config = ActorConfig(strategy="isograd", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=mode)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(logp, sequences.offsets())}
    loss, _ = ppo_loss(config, output, tu.get_tensordict(tensors, told))
    (loss / RANKS).backward()
    found, at = torch.zeros(len(lengths), LONGEST, dtype=torch.float64), 0
    for row, length in enumerate(lengths):  # a token's log probability stands at the place before it
        assert logp.grad is not None
        found[row, :length] = logp.grad[at + PROMPT - 1 : at + PROMPT - 1 + length]
        at += PROMPT + length
    return found


MODES = {"token-mean": "tokens", "seq-mean-token-mean": "sequences", "seq-mean-token-sum": "sums",
         "seq-mean-token-sum-norm": "length"}  # fmt: skip


@pytest.mark.peers
@pytest.mark.parametrize("mode", MODES)
def test_a_token_of_verls_losses_counts_as_often_as_the_table_says(mode: str) -> None:
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import agg_loss

    for place, lengths in LENGTHS.items():
        mask, mean = mask_of(place), MODES[mode]
        off = {
            "token-mean": 1.0,
            "seq-mean-token-sum-norm": LONGEST / max(lengths),  # without loss_scale_factor
        }.get(mode, SEQUENCES / ROWS)  # a completion without tokens is counted
        torch.testing.assert_close(slopes(place, mode), off * weights(place, mean), rtol=1e-6, atol=1e-12)
        if mode == "seq-mean-token-sum-norm":
            continue
        values = torch.zeros_like(mask).requires_grad_()  # on one rank, in a script that divides by its micro-batches
        (agg_loss(values, mask, mode) / (RANKS * MICROS)).backward()
        assert values.grad is not None
        torch.testing.assert_close(values.grad, of_means(place, mean) * weights(place, mean), rtol=1e-6, atol=1e-12)


def test_the_arithmetic_of_nemo_rl_counts_as_often_as_the_table_says() -> None:
    """Read in its sources, and written again here: a micro-batch's sum over a count of the step, times the data ranks,
    which FSDP's mean undoes; but the term of right answers divides by the micro-batch's own tokens."""
    for place, lengths in LENGTHS.items():
        mask = mask_of(place)
        for count, off in ((TOKENS, 1.0), (sum(lengths), TOKENS / sum(lengths))):
            values = torch.zeros_like(mask).requires_grad_()
            ((values * mask).sum() / count * RANKS / RANKS).backward()
            assert values.grad is not None
            torch.testing.assert_close(values.grad, off * weights(place, "tokens"))
