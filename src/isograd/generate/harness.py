"""lm-eval-harness, by its own library (lm_eval, an extra): its tasks and metrics, and a Scorer for its model.

All ranks run it alike, each with all requests: what is divided among them is the scoring. Its seeds are left alone, as
torch's generator is part of a run's checkpoints. A task of a folder may name functions in that folder's own Python
files, which lm_eval runs: name folders that you trust.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any

from isograd.comm.consensus import all_gather_object
from isograd.errors import ConfigError, TrainError, headline, if_not_installed
from isograd.generate.scoring import Scorer

LONGEST = 256  # tokens of an answer, where a task does not say


def need() -> Any:
    """The package lm_eval, or how to install it."""
    what = "tasks of lm-eval-harness are asked for, and the package is not installed"
    said = {"expected": "the package lm_eval", "fix": "pip install lm_eval, or leave the tasks out"}
    with if_not_installed(lambda error: TrainError("IG982", what, seen=str(error), **said)):
        import lm_eval
    return lm_eval


def harness(scorer: Scorer, tasks: Sequence[str], folder: str | None, limit: int | None) -> dict[str, float]:
    """{"task/metric": number}. folder: of tasks as YAML, in place of the library's own thousands, which take seconds to
    read. limit: documents of a task."""
    lm_eval = need()
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager

    class ScoredModel(TemplateLM):  # type: ignore[misc, unused-ignore]
        eot_token_id = scorer.end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return scorer.encode(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            rows = []
            for _texts, before, after in requests:
                asked = after[-(scorer.room - 1) :]
                rows.append(([*before, *after][-scorer.room :], len(asked)))
            return scorer.score(rows)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            texts = [list(scorer.windows([scorer.end, *scorer.encode(one.args[0])])) for one in requests]
            found = iter(scorer.score([row for rows in texts for row in rows]))
            return [sum(next(found)[0] for _ in rows) for rows in texts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [_answer(scorer, *one.args) for one in requests]

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):  # bars
            manager = TaskManager(include_path=folder, include_defaults=folder is None)
            found = lm_eval.simple_evaluate(
                model=ScoredModel(), tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0,
                log_samples=False, random_seed=None, numpy_random_seed=None, torch_random_seed=None,
            )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError("IG656", seen=headline(error), tasks=", ".join(tasks)) from error
    mine = {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in (found or {"results": {}})["results"].items()
        for metric, value in metrics.items()
        if "," in metric and "_stderr," not in metric and isinstance(value, int | float)
    }
    first: dict[str, float] = all_gather_object(mine, scorer.mesh)[0]  # lm_eval reports on the first of a machine alone
    return first


def _answer(scorer: Scorer, prompt: str, options: dict[str, Any]) -> str:
    stops = options.get("until") or []
    limit = int(options.get("max_gen_toks", LONGEST))
    return scorer.answer(scorer.encode(prompt), [stops] if isinstance(stops, str) else stops, limit)
