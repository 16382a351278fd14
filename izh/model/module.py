"""What a decoder's parts are made of.

Owns: Module, an nn.Module that costs a step no more than any other object.
Must not know: what the parts compute.
Invariant: an attribute is what was last assigned to it, as in any nn.Module. Hooks are not called.

A step calls some hundred parts, for a few microseconds of work each. nn.Module keeps parameters and parts where Python
looks last, in dictionaries of its own, and with each call asks for hooks: a fifth of what a layer cost beside its
kernels. So attributes lie in the usual place as well, and to call a part is to call its `forward`.
"""

from typing import Any

from torch import nn


class Module(nn.Module):
    """An nn.Module whose parameters and parts are found like any attribute."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        call = vars(cls).get("forward")
        if call is not None:
            type.__setattr__(cls, "__call__", call)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.__dict__[name] = param
