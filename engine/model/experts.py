"""The mixture of experts that takes an MLP's place in Mixtral and Qwen3-MoE."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.model.config import ExpertsConfig
from engine.model.layers import Linear


class MixtureOfExperts(nn.Module):
    """Each token goes through the experts that its router finds likeliest; their answers are added up by probability.

    T tokens, E experts, A of them per token. No padding, no capacity, no token dropped. Where each expert's rows end
    stays on the device: torch's kernel for bfloat16 on CUDA reads it there; elsewhere torch loops over the experts.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_active, self.is_renormalised = config.num_active, config.is_renormalised
        num_experts, inner = config.num_experts, config.intermediate_size
        self.router = Linear(hidden_size, num_experts, bias=False, dtype=dtype, device=device)
        self.gate_up_proj = GroupedLinear(num_experts, hidden_size, 2 * inner, dtype=dtype, device=device)
        self.down_proj = GroupedLinear(num_experts, inner, hidden_size, dtype=dtype, device=device)
        self._expert_ids = torch.arange(num_experts, device=device)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden] -> [T, hidden]
        probabilities, experts = self._route(x)
        # One row per token and expert, the rows of one expert side by side.
        sorted_experts, order = experts.flatten().sort(stable=True)  # [T * A]
        ends = torch.searchsorted(sorted_experts, self._expert_ids, right=True, out_int32=True)  # [E]
        gate, up = self.gate_up_proj(x.index_select(0, order // self.num_active), ends).chunk(2, dim=-1)
        rows = self.down_proj(F.silu(gate) * up, ends)  # [T * A, hidden]

        by_token = torch.empty_like(rows).index_copy_(0, order, rows).view(*experts.shape, -1)  # [T, A, hidden]
        return (by_token * probabilities[:, :, None]).sum(dim=1).to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (float32) and ids of each token's experts, both [T, A]."""
        logits: Tensor = self.router(x)
        probabilities, experts = logits.float().softmax(dim=-1).topk(self.num_active, dim=-1)
        if self.is_renormalised:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities, experts


class GroupedLinear(nn.Module):
    """One matrix per expert, stacked: expert e owns rows [e * out_features, (e + 1) * out_features) of the weight."""

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        shape = (num_experts * out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.num_experts = num_experts

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [rows, in_features], sorted by expert; expert e's rows end before ends[e] (int32)."""
        matrices = self.weight.view(self.num_experts, -1, x.shape[1])
        return F.grouped_mm(x, matrices.transpose(1, 2), offs=ends)
