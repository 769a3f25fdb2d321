"""Which kind an operator of torch is, by its name: what its time depends on."""

from __future__ import annotations

from ptrain.spec.rates import OperatorKind

_KINDS = {
    OperatorKind.ACTIVATION: """
        gelu silu tanh sigmoid exp exp2 expm1 log log2 log1p log_sigmoid_forward softplus erf elu
        mish sin cos hardswish celu selu logaddexp
    """,
    OperatorKind.NORM: """
        native_layer_norm _fused_rms_norm fused_rms_norm native_group_norm native_batch_norm
        _native_batch_norm_legit cudnn_batch_norm mean sum nansum var var_mean std norm
        linalg_vector_norm amax amin aminmax max min argmax argmin prod cumsum cumprod all any
    """,
    OperatorKind.SOFTMAX: """
        _softmax _safe_softmax _log_softmax nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d
        logsumexp logcumsumexp
    """,
    OperatorKind.COPY: """
        clone copy _to_copy to cat stack repeat fill zero zeros ones full arange constant_pad_nd
        roll flip slice_backward select_backward split_with_sizes_copy split_copy new_zeros new_ones
        new_full zeros_like ones_like full_like slice_scatter select_scatter tril triu linspace
        contiguous scalar_tensor eye pixel_shuffle im2col col2im unfold_backward
    """,
    OperatorKind.INDEX: """
        embedding embedding_dense gather index index_select index_put _index_put_impl index_add
        index_copy scatter scatter_add scatter_reduce take masked_select masked_scatter topk sort
        nonzero searchsorted bucketize histc bincount _unique2 unique_dim one_hot
    """,
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def is_free(name: str) -> bool:
    """Return whether an operator of this name moves nothing: it allocates, or waits."""
    return "empty" in name or name.endswith("::_local_scalar_dense")


def kind_of(name: str) -> OperatorKind:
    """Return the kind of an operator whose time depends on bytes, its gradient's too: whatever is
    in no list goes element by element."""
    plain = name.removesuffix("_")
    for known in (plain, plain.removesuffix("_data").removesuffix("_backward")):
        if known in _KIND_OF:
            return _KIND_OF[known]
    return OperatorKind.POINTWISE
