"""Every program that a step on TPU may run, by name and with shapes: for compiling them where there is no TPU.

Each part lists its own, with the very functions that it calls; this file says for which sizes. A new kind of state
joins by one line in `step_programs`, and by its line in PLANNED_COLLECTIVES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from jax.sharding import Mesh

from app.config.model_config import Component, ModelConfig
from app.core.ports import PoolSpec
from app.core.sliding_window import pages_seen
from app.memory.req_to_token_pool import table_programs
from app.models.decoder_programs import DecoderPrograms
from app.models.flat_programs import FlatPrograms
from app.models.layer_runs import layer_run_for
from app.models.layers.flat_attention import FlatAttention
from app.models.sampler import sampler_programs
from app.runtime.buckets import MAX_CHUNK
from app.runtime.dispatch import table_row_programs, window_row_programs
from app.runtime.row_sampling import sampling_programs
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.hybrid_pool import state_copy_programs
from app.tpu.page_carriers import hybrid_page_programs, page_programs
from app.tpu.program import Program


class Sends(NamedTuple):
    """Operations between devices, by kind, that a program of a model cut over several has; with one device, none."""

    once: Mapping[str, int]
    a_layer: Mapping[str, int]

    def in_text(self, num_layers: int) -> Counter[str]:
        """As the program's text counts them, with so many layers in it: `LayerRun.layers_in_text`."""
        return Counter(self.once) + Counter({kind: num_layers * number for kind, number in self.a_layer.items()})


_NOTHING = Sends(once={}, a_layer={})
# The embedding is summed over the ranks' shares of the vocabulary, and so are attention's and the FFN's outputs over
# their shares of heads and columns; the shares of the logits are brought together for the sampler.
_MODEL = Sends(once={"all-reduce": 1, "all-gather": 1}, a_layer={"all-reduce": 2})

PLANNED_COLLECTIVES: Mapping[str, Sends] = MappingProxyType(
    {
        "prefill": _MODEL,
        "decode": _MODEL,
        "page_table_update": _NOTHING,
        "page_table_rows": _NOTHING,
        "feed": _NOTHING,
        "remember": _NOTHING,
        "sample_greedy": _NOTHING,
        "sample_everything": _NOTHING,
        "penalties_begin": _NOTHING,
        "penalties_count": _NOTHING,
        "backup": _NOTHING,
        "restore": _NOTHING,
    }
)

# Of models whose layers keep different things, beside those of every model.
PLANNED_IN_HYBRIDS: Mapping[str, Sends] = MappingProxyType(
    {
        "embed_tokens": Sends(once={"all-reduce": 1}, a_layer={}),
        "embed_chunks": Sends(once={"all-reduce": 1}, a_layer={}),
        "decode_layers": Sends(once={}, a_layer={"all-reduce": 2}),
        "extend_layers": Sends(once={}, a_layer={"all-reduce": 2}),
        "logits": Sends(once={"all-gather": 1}, a_layer={}),
        "last_logits": Sends(once={"all-gather": 1}, a_layer={}),
        "window_table_rows": _NOTHING,
        "state_copy": _NOTHING,
        **{f"{way}_{kind}": _NOTHING for way in ("backup", "restore") for kind in ("full", "window", "states")},
        **{name: sends for name, sends in PLANNED_COLLECTIVES.items() if sends is _NOTHING},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The shapes of one step; each is a bucket."""

    num_rows: int  # request rows
    max_pages: int  # of the longest request
    batch: int  # rows in this step
    context_pages: int  # of the longest of them
    chunk_tokens: int  # of prompts, all rows of the step together


def step_programs(
    config: ModelConfig, mesh: Mesh, spec: PoolSpec, attention: FlatAttention, dtype: str, sizes: StepSizes
) -> list[Program]:
    """The programs of a model over a flat pool. Nothing is allocated, and no device of `mesh` need be there.

    Raises ConfigError when the mesh cannot share out the model or the pool is not of this model's shape.
    """
    model = FlatPrograms(config, mesh, spec, attention, layer_run_for(mesh), dtype)
    batch, width, chunk = sizes.batch, sizes.context_pages, sizes.chunk_tokens
    max_chunk = min(chunk, MAX_CHUNK)
    rows, pages = sizes.num_rows, sizes.max_pages
    return [
        model.extend_program(batch=batch, num_tokens=chunk, max_chunk=max_chunk, width=width),
        model.decode_program(batch=batch, width=width),
        *table_programs(num_rows=rows, max_pages=pages, num_cells=batch, mesh=mesh),
        *table_row_programs(num_rows=rows, max_pages=pages, batch=batch, width=width, mesh=mesh),
        *sampling_programs(num_rows=rows, batch=batch, mesh=mesh),
        *sampler_programs(num_rows=rows, batch=batch, vocab_size=config.vocab_size, mesh=mesh),
        *page_programs(spec, mesh, attention.layout),
    ]


def hybrid_step_programs(
    config: ModelConfig, mesh: Mesh, spec: HybridSpec, page_size: int, dtype: str, sizes: StepSizes
) -> list[Program]:
    """The programs of a model over HybridBuffers; of layers, those of each pattern of them, named by what they do and
    the layers that they stand for. Raises as `step_programs`.
    """
    model = DecoderPrograms(config, mesh, spec, dtype)
    batch, width, chunk = sizes.batch, sizes.context_pages, sizes.chunk_tokens
    max_chunk = min(chunk, MAX_CHUNK)
    rows, pages = sizes.num_rows, sizes.max_pages
    window = config.sliding_window if Component.SWA in config.components else None
    window_width = 1 if window is None else min(pages_seen(chunk, window, page_size), pages)
    listed = [
        *model.programs(batch=batch, width=width, window_width=window_width, num_tokens=chunk, max_chunk=max_chunk),
        *table_programs(num_rows=rows, max_pages=pages, num_cells=batch, mesh=mesh),
        *table_row_programs(num_rows=rows, max_pages=pages, batch=batch, width=width, mesh=mesh),
        *sampling_programs(num_rows=rows, batch=batch, mesh=mesh),
        *sampler_programs(num_rows=rows, batch=batch, vocab_size=config.vocab_size, mesh=mesh),
        *hybrid_page_programs(spec, mesh),
    ]
    if window is not None:
        listed += window_row_programs(num_rows=rows, max_pages=pages, batch=batch, width=window_width, mesh=mesh)
    if spec.states is not None:
        listed += state_copy_programs(spec.abstract(mesh).states, batch)
    return listed


def planned_name(program: str) -> str:
    """The name in PLANNED_IN_HYBRIDS of a program: those of different layers send alike."""
    return program.partition("_layers_")[0] + "_layers" if "_layers_" in program else program
