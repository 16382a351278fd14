"""Adapters in the step.

Owns: bringing the weights that a plan's sequences hold into their slots, and each row's slot.
Must not know: why a sequence has the slot it has (the gate does).
Invariant: before a forward pass, each slot that a row names holds exactly the weights leased by that row's sequence.
"""

from izh.adapters.bank import AdapterBank
from izh.adapters.gate import AdapterGate
from izh.batch import Batch
from izh.sequence import Plan


class AdapterStage:
    """The Stage (izh/seams.py) of LoRA adapters."""

    def __init__(self, bank: AdapterBank, gate: AdapterGate) -> None:
        self._bank = bank
        self._gate = gate
        self._rows: list[int] = []  # the slot of each row of the step; -1 for the base model

    def sync(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            slot = self._gate.slot(chunk.sequence)
            if slot is not None:
                adapter = self._gate.adapter(chunk.sequence)
                if self._bank.content(slot) != adapter.digest:
                    self._bank.write(slot, adapter)

    def fill(self, plan: Plan, batch: Batch) -> None:
        self._rows = []
        for chunk in plan.chunks:
            slot = self._gate.slot(chunk.sequence)
            self._rows += [-1 if slot is None else slot] * chunk.count
        self._bank.activate(self._rows)

    def narrow(self, rows: list[int]) -> None:
        self._bank.activate([self._rows[row] for row in rows])
