"""How far a request's KV may reach in a step that verifies drafts: numbers of tokens, pure.

A request brings its last token and K drafts to a step, and the step gives it 1 to K + 1 tokens. How
many, the host learns when it reads the step; a next step is launched before that, behind however
many there are. So its rows may stand up to K positions further on than the host counts, and what
the drafts themselves need comes on top. Nothing is ever wanted beyond the last token but one that
the request can have: the last one's KV is read by nobody.
"""

from engine.request import Request


def most_kv_tokens(request: Request, max_model_len: int) -> int:
    """Return how many tokens' KV the request can ever need.

    Args:
        request: whose.
        max_model_len: most tokens of prompt and output together.
    """
    most_tokens = min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
    return most_tokens - 1


def needed_tokens(request: Request, num_drafts: int, max_model_len: int) -> int:
    """Return how many tokens' KV must have a place before the next step: the last token's.

    Args:
        request: that goes on by what the host knows.
        num_drafts: K of the steps that are launched and not read, at most one of this request.
        max_model_len: most tokens of prompt and output together.
    """
    return _reach(request, num_drafts, 0, max_model_len)


def wished_tokens(request: Request, num_drafts: int, max_model_len: int) -> int:
    """Return how many should have one, so that all drafts of the next step can be verified."""
    return _reach(request, num_drafts, num_drafts, max_model_len)


def _reach(request: Request, num_unknown: int, num_drafts: int, max_model_len: int) -> int:
    launched = request.num_launched_tokens
    furthest = request.num_computed_tokens + launched * (1 + num_unknown) + 1 + num_drafts
    return min(furthest, most_kv_tokens(request, max_model_len))
