"""Why a rank's slice of the tokens has other outputs than on one device, or other gradients."""

from __future__ import annotations

from ptrain.axes.context.attention import context_of
from ptrain.report.finding import Culprit, Moment
from ptrain.verification.causes.attended import other_heads, other_keys, other_positions
from ptrain.verification.causes.attention_gradients import not_home, of_some_keys
from ptrain.verification.causes.scene import Investigation
from ptrain.verification.causes.token_layout import Own, TokenLayout, agreed
from ptrain.verification.causes.values import Explanation


def context_cause(scene: Investigation) -> Culprit | None:
    """Explain a module's output, or the gradient of it, that departs where cp cuts the tokens: by
    what most ranks say, each of which may have several explanations. Collective."""
    step = context_of(scene.spec)
    if step is None:
        return None
    causes = _FORWARD if scene.first.moment is Moment.FORWARD else _BACKWARD
    layout = TokenLayout.of(step)

    def said(own: Own) -> list[Explanation]:
        return next(filter(None, (list(cause(scene, layout, own)) for cause in causes)), [])

    return agreed(scene, said, str(step.axis))


_FORWARD = (other_heads, other_keys, other_positions)
_BACKWARD = (not_home, of_some_keys)
