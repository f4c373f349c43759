"""How a rank runs its steps together with the others: choices that change no result.

Made once, before the model is built. Everything has a default that fits the axes in use.
"""

from dataclasses import dataclass, field
from typing import Any

from engine.micro_batches import OverlapRule
from engine.parallel.groups import RankGroup
from engine.parallel.token_dispatcher import TokenDispatcher
from engine.side_stream import SideRule, SideStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """See the module.

    Attributes:
        scatter_tokens: whether each tp rank keeps its share of the hidden states, or all of them;
            None for shares where tp > 1 and ep > 1.
        dispatcher: of all MoE layers, of `choose_dispatcher`; None for one that opens nothing.
        max_masked_tokens: most tokens of a step of prefill whose rows it lays out masked; 0: none.
            Each expert has room for each of them, so such a step may take the most memory.
        overlap: when a step of prefill runs as two micro-batches; None for never. With dp > 1 and
            ep > 1 every step does, because the ranks have to make the same calls.
        overlap_shared_expert: run the shared expert while tokens travel to the routed ones, or
            after they have arrived.
        side_stream: that the shared expert runs on, beside routing and travelling tokens; None for
            the stream of all else.
        side_rule: in which steps it does, and how.
        dependent_launches: bring each kernel of a decode step, or of a short one of prefill that is
            captured, onto the GPU while the one before it runs; without effect where no Hopper GPU
            runs the model.
        tp_group: ranks that share heads, with what they opened to send rows; None for the model's.
    """

    scatter_tokens: bool | None = None
    dispatcher: TokenDispatcher[Any] | None = None
    max_masked_tokens: int = 0
    overlap: OverlapRule | None = None
    overlap_shared_expert: bool = True
    side_stream: SideStream | None = None
    side_rule: SideRule = field(default_factory=SideRule)
    dependent_launches: bool = False
    tp_group: RankGroup | None = None
