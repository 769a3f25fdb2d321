"""Why a rank's slice of the tokens has other outputs than on one device, or other gradients."""

from __future__ import annotations

from collections import Counter

from ptrain.axes.context.attention import context_of
from ptrain.report.finding import Moment
from ptrain.verification.causes.attended import other_heads, other_keys, other_positions
from ptrain.verification.causes.query_gradients import of_some_keys
from ptrain.verification.causes.scene import Cause, Investigation
from ptrain.verification.causes.sent_home import not_home
from ptrain.verification.causes.token_layout import Explanation, Own, TokenLayout
from ptrain.verification.causes.trials import directly


def context_cause(scene: Investigation) -> Cause | None:
    """Explain a module's output, or the gradient of it, that departs where cp cuts the tokens: by
    what most ranks say, each of which may have several explanations. Collective."""
    step = context_of(scene.spec)
    if step is None:
        return None
    said: list[Explanation] = []
    if (own := Own.departing(scene)) is not None:
        layout = TokenLayout.of(step)
        causes = _FORWARD if scene.first.moment is Moment.FORWARD else _BACKWARD
        said = next(filter(None, (list(cause(scene, layout, own)) for cause in causes)), [])
    everyone = [
        [Explanation(*explanation) for explanation in its]
        for its in scene.exchange.gather(list(map(list, said)))
    ]
    factors = Counter(factor for its in everyone for factor in {why.factor: why for why in its})
    if not factors:
        return None
    usual, _ = factors.most_common(1)[0]
    explanation = next(its for said in everyone for its in said if its.factor == usual)
    cause = Cause(str(step.axis), usual + explanation.whose, explanation.sentence)
    by_all = scene.by_all(everyone)
    what = "returns" if scene.first.moment is Moment.FORWARD else "hands back"
    tried = f"one device's {scene.first.place}, computed so, {what} what the ranks have"
    return directly(cause, tried, by_all=by_all)


_FORWARD = (other_heads, other_keys, other_positions)
_BACKWARD = (not_home, of_some_keys)
