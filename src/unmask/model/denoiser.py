"""The denoiser network: a backbone, with the parameterization of its objective."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from unmask.backbones import BackboneConfig
from unmask.backbones.base import Backbone
from unmask.context import Cache, Context, Prefix
from unmask.diffusion.categorical import DAMAGED
from unmask.diffusion.process import Process
from unmask.objectives import Objective
from unmask.ops.checks import holds
from unmask.ops.chunked_head import LogitsRowFn, chunked_head, log_probs_inplace
from unmask.ops.linear import DEFAULT_GROUP_SIZE, Bits, Linear, PackedLinear, QuantizedLinear, prepack
from unmask.sampling.base import Sampler
from unmask.training.hooks import Hook
from unmask.training.lora import LoRA
from unmask.types import NonFiniteError, Positions, Queries, RowFn, Times, Tokens, Vocab

_MAX_SECOND_COPY = 1 << 30
"""Bytes up to which second copies of the matrices are kept, in another order."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that is needed to build a denoiser, except its weights."""

    vocab: Vocab
    """The token ids."""
    backbone: BackboneConfig
    """The network."""
    objective: Objective
    """The training loss, with its process and parameterization."""
    condition_on_sigma: bool = False
    """Condition the network on sigma = -log alpha(t) instead of t, as published weights expect."""
    sampler: Sampler | None = None
    """The sampler that the model comes with, which published families have; None: the one of its process."""

    def __post_init__(self) -> None:
        if not isinstance(self.objective, Objective):
            raise ValueError(f"the objective must be an Objective, as in unmask.MDLM(); got {self.objective!r}")
        if not isinstance(self.backbone, BackboneConfig):
            raise ValueError(f"the backbone must be a BackboneConfig, as in unmask.DiTConfig(); got {self.backbone!r}")
        if self.condition_on_sigma:
            self.objective.process.sigma(torch.ones(()))  # refuses where there is none

    def build(self) -> Denoiser:
        """A denoiser with newly initialized weights."""
        denoiser: Denoiser | None = self.objective.build_denoiser(self)
        return Denoiser(self) if denoiser is None else denoiser


class Denoiser(nn.Module):
    """log_x = objective.log_probs(lm_head(encode(z, t)[positions])): implements `DenoiserLike`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.use_bf16 = False
        self._has_nan: Tensor | None = None
        self.backbone: Backbone = config.backbone.build(config.vocab)
        self.objective_parameters = config.objective.new_parameters(config.vocab)
        if self.backbone.capabilities.causal != self.process.is_left_to_right:
            raise ValueError(
                "an autoregressive objective needs a causal backbone, and masked or uniform diffusion one"
                f" that is not; got causal={self.backbone.capabilities.causal} with {type(config.objective).__name__}"
            )

    @property
    def vocab(self) -> Vocab:
        """The token ids, and which one is the mask."""
        return self.config.vocab

    @property
    def objective(self) -> Objective:
        """The training loss, with its process and parameterization."""
        return self.config.objective

    @property
    def process(self) -> Process:
        """The forward process, whose schedules may be learned."""
        return self.config.objective.process_with(self.objective_parameters)

    @property
    def normalized(self) -> bool:
        """Whether every row of log_x sums to one."""
        return self.config.objective.normalized

    @property
    def time_independent(self) -> bool:
        """Whether log_x depends on z only, not on t."""
        return not self.backbone.capabilities.time_conditioned and not self.config.objective.depends_on_alpha

    @property
    def own_sampler(self) -> Sampler | None:
        """The sampler that the model comes with, if it has one."""
        return self.config.sampler

    @property
    def max_length(self) -> int | None:
        """The longest text that the network accepts; None if there is no limit."""
        longest = self.backbone.capabilities.max_length
        return None if longest is None else longest - self.objective.end_marks

    @property
    def shift_logits(self) -> bool:
        """Whether a token is predicted at the position before it."""
        return self.backbone.capabilities.shift_logits

    def forward(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        """log_x [N, V] at the queried positions of z [B, L] with times t [B, 1 or L], or `row_fn` of its rows.

        Shapes are always checked, values of tokens and times on a CPU only: on other devices the check would
        synchronize, and values are checked where they enter the library.
        """
        self._validate_shapes(z, t, positions, context)
        self._validate_values(z, t)
        sameness = self._sameness(z, t, context)
        queries, order = Queries.resolve(positions, z.shape, *sameness)
        # Where sizes are known on the host, a device is not waited for only to learn that sequences are the same.
        facts = queries.facts or [holds(fact, unknown=False) for fact in sameness]
        read_once = bool(sameness) and all(facts)
        with torch.autocast(z.device.type, torch.bfloat16) if self.use_bf16 else nullcontext():
            hidden = self._encode(z, self._time_input(t), queries, context, read_once)
        if order is not None:
            hidden = hidden[order]
        return self._read(hidden, self._alpha(z, t, queries if order is None else positions), row_fn)

    def _read(
        self, hidden: Float[Tensor, "N width"], alpha: Float[Tensor, "N 1"], row_fn: RowFn | None
    ) -> Shaped[Tensor, " N *values"]:
        """log_x [N, V] of hidden states, or `row_fn` of its rows."""
        if self._has_bf16_head:
            hidden = hidden.bfloat16()
        if row_fn is None:
            rows = log_probs_inplace(self.objective, self.backbone.compute_logits(hidden), alpha, self.vocab)
        else:
            rows = self._apply_head(hidden, LogitsRowFn(self.objective, alpha, self.vocab, row_fn))
        if not self.training:  # the training loop checks the loss itself, and skips the step
            self._check_finite(self._damaged(rows, row_fn))
        return rows

    @property
    def _has_bf16_head(self) -> bool:
        """Whether the products of the head are those of bfloat16, as all others; its sums never are."""
        return self.use_bf16 and self.backbone.lm_head.weight.dtype == torch.bfloat16

    def dense_log_probs(self, tokens: Tokens, t: Times | None = None) -> Float[Tensor, "B L V"]:
        """log_x [B, L, V] at all positions of tokens [B, L], at times t [B, 1] (None: 0).

        It checks no values and reads none, so that it can be traced: a graph knows only shapes.
        """
        t = torch.zeros_like(tokens[:, :1], dtype=torch.float32) if t is None else t
        hidden = self.backbone.encode(self.backbone.embed(tokens), self._time_input(t))
        logits = self.backbone.lm_head(hidden.flatten(0, 1))
        # As indices, because booleans would make the number of rows unknown to a graph.
        row, place = (torch.arange(size, device=tokens.device) for size in tokens.shape)
        positions = row[:, None].expand(tokens.shape).flatten(), place.expand(tokens.shape).flatten()
        log_x = self.objective.log_probs(logits, self._alpha(tokens, t, positions), self.vocab)
        return log_x.reshape(*tokens.shape, self.vocab.size)

    def features(self, tokens: Tokens, context: Context = Context()) -> Float[Tensor, "B L width"]:
        """The hidden states of clean tokens [B, L], t = 0, each at its own position: `Backbone.features`."""
        self.backbone.require(context)
        t = torch.zeros(len(tokens), 1, device=tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16) if self.use_bf16 else nullcontext():
            return self.backbone.features(self.backbone.embed(tokens), self._time_input(t), context)

    def _apply_head(self, hidden: Float[Tensor, "N width"], row_fn: LogitsRowFn) -> Shaped[Tensor, " N *values"]:
        head = self.backbone.lm_head
        if self.backbone.has_plain_head:
            return chunked_head(hidden, head.weight, head.bias, row_fn)
        return row_fn(self.backbone.compute_logits(hidden), slice(0, len(hidden)))

    def new_cache(self, prefix: Prefix | None = None) -> Cache:
        """An empty cache, as the backbone makes it."""
        return self.backbone.new_cache()

    @property
    def stored_module(self) -> nn.Module:
        """The module whose tensors a model folder holds."""
        return self.backbone

    def load_initial(self, other: Denoiser) -> None:
        """Start from the weights of another model, whose network is the same; from what its objective has learned,
        too, if that is the same."""
        self.backbone.load_state_dict(other.backbone.state_dict())
        learned, theirs = self.objective_parameters, other.objective_parameters
        if learned is not None and theirs is not None and type(self.objective) is type(other.objective):
            learned.load_state_dict(theirs.state_dict())

    def change_objective(self, config: ModelConfig) -> None:
        """Keep the network as it is, in its types, under the vocabulary and objective of another config.

        What the objective learns is new.
        """
        if config.backbone != self.config.backbone or config.objective.process.is_continuous:
            raise ValueError(f"{type(config.objective).__name__} needs a network of its own")
        self.config, self.use_bf16 = config, False
        self.objective_parameters = config.objective.new_parameters(config.vocab)

    def lr_scales(self) -> dict[str, float]:
        """Factors of the learning rate for parameters, by name, that do not have the optimizer's own; see `AdamW`."""
        return {}

    def training_hooks(self) -> list[Hook]:
        """What happens around training steps because of this model."""
        return []

    def blocks(self) -> Sequence[nn.Module]:
        """The repeated blocks of the network."""
        return self.backbone.blocks()

    def _damaged(self, values: Shaped[Tensor, " N *values"], row_fn: RowFn | None) -> Bool[Tensor, " N *shape"]:
        """Whether values are NaN, or tokens that could not be drawn (-1).

        One column is enough where log_x is a softmax, which is NaN as a whole.
        """
        if not values.is_floating_point():
            return values < 0
        return (values[:, 0] if row_fn is None and self.objective.is_softmax else values).isnan()

    def _sameness(self, z: Tokens, t: Times, context: Context) -> tuple[Tensor, ...]:
        """Boolean scalars: whether all sequences are equal, in calls where equal sequences may be encoded once."""
        if len(z) == 1 or self.training or torch.is_grad_enabled() or not context.is_empty:
            return ()
        same_text = (z == z[:1]).all()
        return (same_text, (t == t[:1]).all()) if self.backbone.capabilities.time_conditioned else (same_text,)

    def _encode(
        self,
        z: Int[Tensor, "B L"],
        time_input: Float[Tensor, " B #L"],
        queries: Queries,
        context: Context,
        read_once: bool,
    ) -> Float[Tensor, "N width"]:
        """Hidden states [N, width]. If all sequences are equal, as before the first step, one is encoded."""
        backbone = self.backbone
        if not read_once:
            return backbone.encode(backbone.embed(z), time_input, queries, context)
        return backbone.encode(backbone.embed(z[:1]), time_input[:1])[0, queries[1]]

    def _check_finite(self, damaged: Tensor) -> None:
        """Raise on NaN: on a CPU at once, elsewhere later in `raise_if_nonfinite`, so that no call synchronizes."""
        has_nan = damaged.any()
        if has_nan.device.type != "cpu":
            self._has_nan = has_nan if self._has_nan is None else self._has_nan | has_nan
        elif not holds(~has_nan):
            raise NonFiniteError(DAMAGED)

    def raise_if_nonfinite(self) -> None:
        """Raise NonFiniteError if a log-probability of an earlier call was NaN."""
        has_nan, self._has_nan = self._has_nan, None
        if has_nan is not None and bool(has_nan):
            raise NonFiniteError(DAMAGED)

    def to_bf16(self, part: nn.Module | None = None) -> None:
        """From now on compute hidden states with bfloat16 matrix products; a network that is filled bit by bit has them
        converted one `part` after another.

        The matrices are converted in place: half the memory, and on machines with bfloat16 instructions about half
        the time. The residual stream, norms, the head's sums and sampling stay in float32.
        """
        if LoRA.is_applied(self):
            raise ValueError("a network with LoRA layers cannot be converted to bfloat16; merge them first")
        self.use_bf16 = True
        of_network = set(self.backbone.modules()) - {self.backbone.lm_head}
        for module in (part or self.backbone).modules():
            if isinstance(module, nn.Linear) and module in of_network and not module.weight.is_meta:
                module.weight.data = module.weight.data.bfloat16()

    def quantizable_layers(self) -> dict[str, nn.Linear]:
        """The linear layers of the blocks that `quantize` rounds, by name: those that only multiply.

        Routers, modulation and the head are not among them.
        """
        of_blocks = {module for block in self.blocks() for module in block.modules()}
        layers = {name: layer for name, layer in self.named_modules() if isinstance(layer, nn.Linear)}
        inside = {name: layer for name, layer in layers.items() if layer in of_blocks}
        ours = [name for name, layer in inside.items() if isinstance(layer, Linear)]
        return {name: inside[name] for name in ours or inside}  # those of other libraries are all alike

    def quantize(self, bits: Bits, group_size: int = DEFAULT_GROUP_SIZE) -> None:
        """From now on keep the matrices of the blocks in 8 or 4 bits, each `group_size` weights with a scale."""
        for name in self.quantizable_layers():
            self.quantize_layer(name, bits, group_size)

    def quantize_layer(self, name: str, bits: Bits, group_size: int) -> None:
        """Replace one of the quantizable layers; one whose rows are too short stays as it is."""
        layer = self.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        rounded = QuantizedLinear.from_linear(layer, bits, group_size)
        if rounded is not None:
            self.set_submodule(name, rounded)

    @property
    def weights_dtype(self) -> str:
        """The type in which the matrices are kept: that of the head, or int8 or int4."""
        quantized = next((layer for layer in self.modules() if isinstance(layer, QuantizedLinear)), None)
        if quantized is not None:
            return "int8" if quantized.least is None else "int4"
        return str(self.backbone.lm_head.weight.dtype).removeprefix("torch.")

    @property
    def num_parameters(self) -> int:
        """How many weights the model has, however many bits each takes."""
        total = sum(parameter.numel() for parameter in self.parameters())
        matrices = [layer.weight for layer in self.modules() if isinstance(layer, QuantizedLinear)]
        return total + sum(each.shape.numel() - sum(map(Tensor.numel, each.tensors)) for each in matrices)

    def prepack(self, replace: bool = True) -> None:
        """Keep the matrices in the layout that matrix products read fastest, from now on for inference only.

        Results do not change. Up to `_MAX_SECOND_COPY` bytes these are second copies. The blocks of a larger network
        are reordered one by one, so that it needs no more memory than before; unless `replace` is false, since weights
        that are mapped from files are shared by all processes that read them.
        """
        of_blocks = torch.bfloat16 if self.use_bf16 else torch.float32
        linears = [module for module in self.backbone.modules() if isinstance(module, Linear)]
        dtypes = {layer.weight: of_blocks for layer in linears if not isinstance(layer, PackedLinear)}
        dtypes[self.backbone.lm_head.weight] = torch.bfloat16 if self._has_bf16_head else torch.float32
        if sum(weight.numel() * dtype.itemsize for weight, dtype in dtypes.items()) > _MAX_SECOND_COPY:
            for name, layer in self.quantizable_layers().items():
                if PackedLinear.can_pack(layer, of_blocks):
                    del dtypes[layer.weight]
                    if replace:
                        self.set_submodule(name, PackedLinear(layer))
        if sum(weight.numel() * dtype.itemsize for weight, dtype in dtypes.items()) <= _MAX_SECOND_COPY:
            for weight, dtype in dtypes.items():
                prepack(weight, dtype)

    def _time_input(self, t: Float[Tensor, " B #L"]) -> Float[Tensor, " B #L"]:
        return self.process.sigma(t) if self.config.condition_on_sigma else t

    def _alpha(self, z: Int[Tensor, "B L"], t: Float[Tensor, " B #L"], positions: Positions) -> Float[Tensor, "N 1"]:
        """alpha(t) [N, 1] at masked positions; 0 at unmasked ones, as in the reconstruction term."""
        if not self.objective.depends_on_alpha:
            return t.new_zeros(len(positions[0]), 1)  # which nobody reads
        positions = (positions[0], positions[1]) if isinstance(positions, Queries) else positions
        alpha = self.process.alpha(t).expand(z.shape)[positions]
        return torch.where(z[positions] == self.vocab.mask_id, alpha, 0)[:, None]

    def _validate_shapes(self, z: Tokens, t: Times, positions: Positions, context: Context) -> None:
        if z.ndim != 2 or z.is_floating_point():
            raise ValueError(f"token ids must be integers [B, L]; got {z.dtype} of shape {list(z.shape)}")
        if isinstance(positions, Tensor) and (positions.shape != z.shape or positions.dtype != torch.bool):
            raise ValueError(
                f"positions must be booleans of the tokens' shape {list(z.shape)};"
                f" got {positions.dtype} {list(positions.shape)}"
            )
        # With attention stages a token may be read twice, noisy and clean; it counts once.
        length = z.shape[1] if context.stages is None else context.stages.num_positions
        if self.max_length is not None and length > self.max_length + self.objective.end_marks:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's maximum of {self.max_length}")
        if t.ndim != 2 or t.shape[0] != len(z) or t.shape[1] not in (1, z.shape[1]):
            raise ValueError(f"t must be [B, 1] or [B, L] for tokens {list(z.shape)}; got shape {list(t.shape)}")
        self.backbone.require(context)

    def _validate_values(self, z: Tokens, t: Times) -> None:
        if not holds((z >= 0) & (z < self.vocab.size)):
            self.vocab.validate(z)
        if not holds((t >= 0) & (t <= 1)):
            worst = float(t.flatten()[((t - 0.5).abs().nan_to_num(torch.inf)).argmax()])
            raise ValueError(f"times must be in [0, 1], 0 for data and 1 for all mask; got {worst}")
