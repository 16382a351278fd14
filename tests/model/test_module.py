import torch
from torch import nn

from izh.model.module import Module


class Part(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.inner: nn.Module = nn.Identity()
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_what_was_assigned_last_is_what_is_found_and_listed() -> None:
    part, other = Part(), nn.Linear(1, 1)
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    part.weight, part.bias, part.inner = weight, bias, other
    assert part.weight is weight
    assert part.bias is bias
    assert part.inner is other
    assert dict(part.named_parameters(recurse=False)) == {"weight": weight, "bias": bias}
    assert dict(part.named_children()) == {"inner": other}
    part.bias = None
    assert part.bias is None
    assert [name for name, _ in part.named_parameters(recurse=False)] == ["weight"]
    assert torch.equal(part(torch.ones(2)), torch.full((2,), 2.0))


def test_nothing_is_searched_for() -> None:
    part = Part()
    assert {"weight", "bias", "inner"} <= set(vars(part))
