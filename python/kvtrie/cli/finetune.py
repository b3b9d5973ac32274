"""`kvtrie finetune_...`: fine-tuning on long contexts under a cache's policy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvtrie.cli.cache import add_cache
from kvtrie.cli.dotted import add_data, add_settings, arguments, chosen_data, make_parser, read
from kvtrie.cli.model import DEVICE, MODEL, device, resolve
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["COMMANDS", "run"]

_SUMMARIES = {
    "finetune_long_lora": "fine-tunes adapters on long contexts under a cache's policy",
    "finetune_long_full": "fine-tunes all weights on long contexts under a cache's policy",
    "finetune_offload_lora": "the same for adapters, with weights on the CPU",
    "finetune_offload_full": "the same for all weights, with weights and optimiser on the CPU",
}
_REFUSED = 2


def run(mode: str, words: Sequence[str]) -> int:
    """Run `kvtrie MODE` with its arguments."""
    given = _parsed(mode, words)
    try:
        from kvtrie.train import EvalSettings, GradientSettings, Run, TrainSettings
        from kvtrie.train.lora import LoraSettings
        from kvtrie.train.optimisers import OptimizerSettings
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; kvtrie {mode} needs: pip install 'kvtrie[train]'"
        ) from error
    from kvtrie.selective.settings import CacheSettings

    out_dir: str | None = "." if given.plan and given.out_dir is None else given.out_dir
    if out_dir is None:
        raise ConfigError(f"kvtrie {mode} needs --out_dir, the folder of the run")
    made = Run(
        out_dir=out_dir,
        mode=mode,
        head_model=given.head_model,
        kv_cache=CacheSettings(**dict(given.kv_cache)),
        grad=GradientSettings(**arguments(given.grad)),
        train=TrainSettings(**arguments(given.train)),
        eval=EvalSettings(**arguments(given.eval)),
        lora=LoraSettings(**(arguments(given.lora) if "lora" in given else {})),
        optimizer=OptimizerSettings(**arguments(given.optimizer)),
        **{name: given[name] for name in _RUN},
    )
    data = chosen_data(given.data)
    from kvtrie.train.parallel import spawn, spawned

    if made.devices > 1 and not spawned():
        return spawn(made.devices, [mode, *words])
    speaker = resolve(given.model)
    model: Any = speaker.model
    if given.precision is not None:
        from kvtrie.demo.long_prompt import as_precise

        model = as_precise(model, given.precision)
    if given.plan:
        from kvtrie.train.plan import plan

        more = {"continued": speaker.continued, "chat": speaker.chat}
        data.prepare(speaker.tokens, name=given.model, **more)
        longest = max(data.train.lengths)
        sys.stdout.write(plan(model, made, longest, memory_gb=given.plan_memory_gb))
        return 0
    from kvtrie.train import finetune

    finetune(
        model,
        data,
        made,
        tokens=speaker.tokens,
        continued=speaker.continued,
        chat=speaker.chat,
        text=speaker.text,
        name=given.model,
        write=sys.stdout.write,
    )
    return 0


_RUN = (
    "devices",
    "device",
    "verbose",
    "seed",
    "resume",
    "yarn_rope",
    "attention_forward_temp_size_gb",
    "attention_backward_temp_size_gb",
    "record_gpu_memory_snapshots",
    "record_gpu_memory_kind",
)


def _parsed(mode: str, words: Sequence[str]) -> Any:  # noqa: ANN401 - a jsonargparse namespace
    parser = _parser(mode)
    if not mode.endswith("lora") and any(each.startswith("--lora") for each in words):
        raise ConfigError(f"{mode} trains all weights and takes no --lora.*")
    given = read(parser, _spelt(words))
    given.device = device(given.device)
    if given.plan_memory_gb is not None and not given.plan:
        raise ConfigError(
            f"--plan_memory_gb {given.plan_memory_gb:g} takes effect with --plan only"
        )
    return given


def _parser(mode: str) -> Any:  # noqa: ANN401 - a jsonargparse parser
    parser = make_parser(mode, _SUMMARIES[mode])
    try:
        from kvtrie.train import EvalSettings, GradientSettings, TrainSettings
        from kvtrie.train.lora import LoraSettings
        from kvtrie.train.optimisers import OptimizerSettings
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; kvtrie {mode} needs: pip install 'kvtrie[train]'"
        ) from error
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL)
    add = parser.add_argument
    add("--out_dir", type=str | None, help="the folder of the run, optional with --plan")
    add("--head_model", type=str, default="next_token_prediction", help="from outputs to the loss")
    add("--precision", type=str | None, help="of weights and KV: 32-true, 16-true or bf16-true")
    add("--devices", type=int, default=1, help="processes sharing a batch")
    add("--device", type=str | None, help=DEVICE)
    add("--verbose", type=str, default="some", help="none, some, more or all")
    add("--seed", type=int, default=0, help="of order, dropout and fresh weights")
    add("--resume", type=bool, default=False, help="go on from the last checkpoint in out_dir")
    add("--plan", action="store_true", help="print cells and bytes, and run nothing")
    add("--plan_memory_gb", type=float | None, help="memory to fit the cache into, for --plan")
    add("--yarn_rope", type=bool, default=True, help="scale RoPE beyond the trained length")
    add("--attention_forward_temp_size_gb", type=float, default=3.0, help="temporary arrays")
    add("--attention_backward_temp_size_gb", type=float, default=3.0, help="the same backwards")
    add("--record_gpu_memory_snapshots", type=int, default=0, help="entries, 0 for none")
    add("--record_gpu_memory_kind", type=int, default=0, help="0 all, 1 rows, 2 first, 3 whole")
    add_cache(parser)
    add_settings(parser, GradientSettings, "grad")
    add_settings(parser, TrainSettings, "train")
    add_settings(parser, EvalSettings, "eval")
    if mode.endswith("lora"):
        add_settings(parser, LoraSettings, "lora")
    add_settings(parser, OptimizerSettings, "optimizer")
    add_data(parser)
    return parser


def _spelt(words: Sequence[str]) -> list[str]:
    """Return the arguments with `--optimizer NAME` replaced by its full key."""
    made: list[str] = []
    for word in words:
        if word == "--optimizer" or word.startswith("--optimizer="):
            made.append(word.replace("--optimizer", "--optimizer.name", 1))
        else:
            made.append(word)
    return made


def _arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `run` parses the dotted keys of these commands."""
    del parser


COMMANDS = {name: (summary, _arguments) for name, summary in _SUMMARIES.items()}
"""Summary of each command, and its function for arguments."""
