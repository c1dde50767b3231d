"""The device side that goes with an attention: how its pool lies in memory, and the runner that drives it."""

from __future__ import annotations

from jax.sharding import Mesh

from app.config.model_config import ModelConfig
from app.core.ports import ModelRunner, PoolSpec
from app.core.transfers import OfEachPool
from app.models.checkpoint import Progress
from app.models.flat_programs import FlatPrograms
from app.models.flat_runner import FlatModelRunner
from app.models.layer_runs import layer_run_for
from app.models.layers.attention_choice import AttentionChoice, AttentionKind
from app.models.layers.flat_attentions import flat_attention
from app.models.model_runner import HybridModelRunner, LlamaModelRunner
from app.models.weights_on_mesh import WeightsSource
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.hybrid_pool import HybridKVPool
from app.tpu.kv_pool import MHATokenToKVPool
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.page_carrier import PageCarrier
from app.tpu.page_carriers import hybrid_page_carriers
from app.tpu.page_carriers import page_carriers as full_page_carriers
from app.tpu.pool_layout import ArrayPerLayer, FlatByHead, FlatWide, PoolLayout

_LAYOUTS: dict[AttentionKind, PoolLayout] = {
    AttentionKind.ROWS: ArrayPerLayer(),
    AttentionKind.RAGGED: FlatByHead(),
    AttentionKind.GATHER: FlatWide(),
}


def device_pool(
    spec: PoolSpec, hybrid_spec: HybridSpec, mesh: Mesh, attention: AttentionChoice, model: ModelConfig
) -> MHATokenToKVPool | HybridKVPool:
    """One kind of pages for a model that keeps keys and values of full attention, HybridBuffers for every other."""
    if model.is_hybrid:
        return HybridKVPool(spec, hybrid_spec, mesh)
    return MHATokenToKVPool(spec, mesh, pool_layout(attention))


def page_carriers(
    spec: PoolSpec, hybrid_spec: HybridSpec, mesh: Mesh, attention: AttentionChoice, model: ModelConfig
) -> OfEachPool[PageCarrier | None]:
    """How pages leave what `device_pool` makes of the same, and come back."""
    if model.is_hybrid:
        return hybrid_page_carriers(hybrid_spec, mesh, spec.num_pages)
    return full_page_carriers(spec, mesh, pool_layout(attention))


def pool_layout(attention: AttentionChoice) -> PoolLayout:
    return _LAYOUTS[attention.kind]


def model_runner(
    *,
    config: ModelConfig,
    weights_source: WeightsSource,
    mesh: Mesh,
    pool_spec: PoolSpec,
    hybrid_spec: HybridSpec,
    attention: AttentionChoice,
    dtype: str,
    progress: Progress | None,
) -> ModelRunner:
    """Groups of layers over arrays of their own for the CPU's attention, all layers over one array for the others.

    Raises ConfigError when the mesh cannot share out the model.
    """
    if config.is_hybrid:
        return HybridModelRunner(config, weights_source, mesh, hybrid_spec, dtype, progress)
    if attention.kind is AttentionKind.ROWS:
        return LlamaModelRunner(config, weights_source, mesh, pool_spec, dtype, progress)
    reads = flat_attention(attention.kind, pool_spec, mesh.shape[TENSOR_AXIS])
    programs = FlatPrograms(config, mesh, pool_spec, reads, layer_run_for(mesh), dtype)
    return FlatModelRunner(config, weights_source, programs, progress)
