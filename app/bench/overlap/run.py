"""How well copies between tiers hide behind compute, and what a hit in each tier is worth: each beside its floor."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.bench.overlap.control import ControlLoad, tier_control_times
from app.bench.overlap.decoding import DecodeLoad, backups_beside_decodes, restores_beside_decodes
from app.bench.overlap.first_token import PrefixLengths, first_token_times
from app.bench.overlap.rig import MakeCopies, overlap_rig
from app.bench.overlap.timeline import draw_timeline
from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.tpu.tier_copies import DeviceCopies

POOL_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapLoad:
    """rounds: of the times to a first token."""

    lengths: PrefixLengths = field(default_factory=PrefixLengths)
    decodes: DecodeLoad = field(default_factory=DecodeLoad)
    control: ControlLoad = field(default_factory=ControlLoad)
    rounds: int = 5
    pool_tokens: int = POOL_TOKENS


def run_overlap_bench(
    args: ServerArgs,
    load: OverlapLoad | None = None,
    *,
    fake: bool = False,
    model: ModelConfig | None = None,
    copies: MakeCopies = DeviceCopies,
) -> tuple[dict[str, Any], str]:
    """-> figures by name, and the timeline of the restores as SVG. Takes some minutes with a real model.

    args: the engine; its pool is sized here, and its storage is a folder that is gone afterwards.
    """
    load = load or OverlapLoad()
    sized = replace(args, max_total_tokens=load.pool_tokens, max_running_requests=load.decodes.rows + 2)
    with tempfile.TemporaryDirectory() as folder:
        with overlap_rig(sized, Path(folder), fake=fake, model=model, copies=copies) as rig:
            first_tokens = first_token_times(rig, load.lengths, load.rounds)
            restores_beside_decodes(rig, load.decodes)  # programs of these batches are compiled
            restores, events = restores_beside_decodes(rig, load.decodes)
            backups = backups_beside_decodes(rig, load.decodes)
            not_worth = rig.tiers.counters().not_worth_restoring
    control = tier_control_times(load.control)
    copy_figures = first_tokens.pop("copies")
    result = {
        **restores,
        **backups,
        "transfer_over_device_put": copy_figures["transfer_over_device_put"],
        "transfer_over_put_of_pages": copy_figures["transfer_over_put_of_pages"],
        "copies_gb_per_s": copy_figures["gb_per_s"],
        "copy_bytes": copy_figures["num_bytes"],
        **first_tokens,
        **control,
        "not_worth_restoring": not_worth,
    }
    return result, draw_timeline(events)
