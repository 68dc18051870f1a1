"""Triton kernels of staircase attention, forward and backward; triton_attention.py launches them.

A program walks the list of tiles that hold work for its own tile: fully visible tiles without any test, then partial
ones, where the predicate of orl_core.visibility is evaluated from the tokens' four attributes. Empty tiles are never
visited and no mask is stored. The reference is orl_train.attention.reference.

Softmax runs in base 2: scores carry a factor log2(e), and `Lse` holds the base-2 logarithm of each row's sum.
Shape legend: B batch, T tokens, H query heads, G key heads, D head width.
"""

# Triton's own annotations make every argument a constexpr:
# pyright: reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def _query_attributes(Vis, at, inside, T):
    """segment, state, limit of query tokens; beyond the end the segment is -2, which equals no other."""
    segment = tl.load(Vis + at, mask=inside, other=-2)
    return segment, tl.load(Vis + 2 * T + at, mask=inside, other=0), tl.load(Vis + 3 * T + at, mask=inside, other=0)


@triton.jit
def _key_attributes(Vis, at, inside, T):
    """segment, position, state of key tokens; beyond the end the segment is -3, which equals no other."""
    segment = tl.load(Vis + at, mask=inside, other=-3)
    return segment, tl.load(Vis + T + at, mask=inside, other=0), tl.load(Vis + 2 * T + at, mask=inside, other=0)


@triton.jit
def _visible(q_at, q_segment, q_state, q_limit, k_at, k_segment, k_position, k_state):
    """orl_core.visibility.is_visible, and padding (segment -1) sees itself."""
    seen = ((k_state == 0) & (k_position < q_limit)) | ((k_state == q_state) & (q_state != 0))
    return (q_segment == k_segment) & tl.where(q_segment == -1, q_at == k_at, seen)


@triton.jit
def _accumulate(acc, total, peak, score, v):
    """One step of the online softmax."""
    new_peak = tl.maximum(peak, tl.max(score, 1))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(score - anchor[:, None])
    decay = tl.exp2(peak - anchor)
    total = total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_peak


@triton.jit
def forward_kernel(
    Q, K, V, Out, Lse, Vis, Start, Middle, End, Index, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, vis_b, list_b, H, T,
    GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    d, lane = tl.arange(0, D), tl.arange(0, TILE)
    q_at = tile * TILE + lane
    q_in = q_at < T
    Q += batch * q_b + head * q_h
    K += batch * k_b + (head // GROUP) * k_h
    V += batch * v_b + (head // GROUP) * v_h
    q = tl.load(Q + q_at[:, None] * q_t + d[None, :], mask=q_in[:, None], other=0.0)
    acc = tl.zeros([TILE, D], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    row = batch * list_b + tile
    start, middle, end = tl.load(Start + row), tl.load(Middle + row), tl.load(End + row)
    for i in range(start, middle):
        k_at = tl.load(Index + i) * TILE + lane
        k = tl.load(K + k_at[:, None] * k_t + d[None, :])
        v = tl.load(V + k_at[:, None] * v_t + d[None, :])
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        acc, total, peak = _accumulate(acc, total, peak, score, v)
    q_segment, q_state, q_limit = _query_attributes(Vis + batch * vis_b, q_at, q_in, T)
    for i in range(middle, end):
        k_at = tl.load(Index + i) * TILE + lane
        k_in = k_at < T
        k = tl.load(K + k_at[:, None] * k_t + d[None, :], mask=k_in[:, None], other=0.0)
        v = tl.load(V + k_at[:, None] * v_t + d[None, :], mask=k_in[:, None], other=0.0)
        k_segment, k_position, k_state = _key_attributes(Vis + batch * vis_b, k_at, k_in, T)
        seen = _visible(
            q_at[:, None], q_segment[:, None], q_state[:, None], q_limit[:, None],
            k_at[None, :], k_segment[None, :], k_position[None, :], k_state[None, :],
        )  # fmt: skip
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        acc, total, peak = _accumulate(acc, total, peak, tl.where(seen, score, float("-inf")), v)
    total = tl.where(total == 0.0, 1.0, total)
    out = acc / total[:, None]
    Out += batch * o_b + head * o_h
    tl.store(Out + q_at[:, None] * o_t + d[None, :], out.to(Out.dtype.element_ty), mask=q_in[:, None])
    tl.store(Lse + (batch * H + head) * T + q_at, peak + tl.log2(total), mask=q_in)


@triton.jit
def query_gradient_kernel(
    Q, K, V, Out, Grad, Lse, Delta, QGrad, Vis, Start, Middle, End, Index, scale, gradient_scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, qg_b, qg_h, qg_t, vis_b, list_b, H, T,
    GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile; also stores Delta = sum_d out * grad, which the key kernel reads."""
    tile, batch, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    d, lane = tl.arange(0, D), tl.arange(0, TILE)
    q_at = tile * TILE + lane
    q_in = q_at < T
    K += batch * k_b + (head // GROUP) * k_h
    V += batch * v_b + (head // GROUP) * v_h
    q = tl.load(Q + batch * q_b + head * q_h + q_at[:, None] * q_t + d[None, :], mask=q_in[:, None], other=0.0)
    g = tl.load(Grad + batch * g_b + head * g_h + q_at[:, None] * g_t + d[None, :], mask=q_in[:, None], other=0.0)
    o = tl.load(Out + batch * o_b + head * o_h + q_at[:, None] * o_t + d[None, :], mask=q_in[:, None], other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(Delta + (batch * H + head) * T + q_at, delta, mask=q_in)
    lse = tl.load(Lse + (batch * H + head) * T + q_at, mask=q_in, other=0.0)
    acc = tl.zeros([TILE, D], tl.float32)
    row = batch * list_b + tile
    start, middle, end = tl.load(Start + row), tl.load(Middle + row), tl.load(End + row)
    for i in range(start, middle):
        k_at = tl.load(Index + i) * TILE + lane
        k = tl.load(K + k_at[:, None] * k_t + d[None, :])
        v = tl.load(V + k_at[:, None] * v_t + d[None, :])
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
        s_grad = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        acc = tl.dot(s_grad.to(k.dtype), k, acc, input_precision="ieee")
    q_segment, q_state, q_limit = _query_attributes(Vis + batch * vis_b, q_at, q_in, T)
    for i in range(middle, end):
        k_at = tl.load(Index + i) * TILE + lane
        k_in = k_at < T
        k = tl.load(K + k_at[:, None] * k_t + d[None, :], mask=k_in[:, None], other=0.0)
        v = tl.load(V + k_at[:, None] * v_t + d[None, :], mask=k_in[:, None], other=0.0)
        k_segment, k_position, k_state = _key_attributes(Vis + batch * vis_b, k_at, k_in, T)
        seen = _visible(
            q_at[:, None], q_segment[:, None], q_state[:, None], q_limit[:, None],
            k_at[None, :], k_segment[None, :], k_position[None, :], k_state[None, :],
        )  # fmt: skip
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None]
        p = tl.exp2(tl.where(seen, score, float("-inf")))
        s_grad = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        acc = tl.dot(s_grad.to(k.dtype), k, acc, input_precision="ieee")
    QGrad += batch * qg_b + head * qg_h
    q_grad = (acc * gradient_scale).to(QGrad.dtype.element_ty)
    tl.store(QGrad + q_at[:, None] * qg_t + d[None, :], q_grad, mask=q_in[:, None])


@triton.jit
def key_gradient_kernel(
    Q, K, V, Grad, Lse, Delta, KGrad, VGrad, Vis, Start, Middle, End, Index, scale, gradient_scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, kg_b, kg_h, kg_t, vis_b, list_b, H, T,
    GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, QUERY_TILE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile, summed over the query heads that share the key head. Works on transposed scores."""
    heads = H // GROUP
    tile, batch, head = tl.program_id(0), (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    d, lane, q_lane = tl.arange(0, D), tl.arange(0, TILE), tl.arange(0, QUERY_TILE)
    k_at = tile * TILE + lane
    k_in = k_at < T
    k = tl.load(K + batch * k_b + head * k_h + k_at[:, None] * k_t + d[None, :], mask=k_in[:, None], other=0.0)
    v = tl.load(V + batch * v_b + head * v_h + k_at[:, None] * v_t + d[None, :], mask=k_in[:, None], other=0.0)
    k_segment, k_position, k_state = _key_attributes(Vis + batch * vis_b, k_at, k_in, T)
    k_acc = tl.zeros([TILE, D], tl.float32)
    v_acc = tl.zeros([TILE, D], tl.float32)
    row = batch * list_b + tile
    start, middle, end = tl.load(Start + row), tl.load(Middle + row), tl.load(End + row)
    for member in range(GROUP):
        q_head = head * GROUP + member
        q_base, g_base = Q + batch * q_b + q_head * q_h, Grad + batch * g_b + q_head * g_h
        statistics = (batch * H + q_head) * T
        for i in range(start, middle):
            q_at = tl.load(Index + i) * QUERY_TILE + q_lane
            q = tl.load(q_base + q_at[:, None] * q_t + d[None, :])
            g = tl.load(g_base + q_at[:, None] * g_t + d[None, :])
            lse, delta = tl.load(Lse + statistics + q_at), tl.load(Delta + statistics + q_at)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :])
            v_acc = tl.dot(p.to(g.dtype), g, v_acc, input_precision="ieee")
            s_grad = p * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta[None, :])
            k_acc = tl.dot(s_grad.to(q.dtype), q, k_acc, input_precision="ieee")
        for i in range(middle, end):
            q_at = tl.load(Index + i) * QUERY_TILE + q_lane
            q_in = q_at < T
            q = tl.load(q_base + q_at[:, None] * q_t + d[None, :], mask=q_in[:, None], other=0.0)
            g = tl.load(g_base + q_at[:, None] * g_t + d[None, :], mask=q_in[:, None], other=0.0)
            lse = tl.load(Lse + statistics + q_at, mask=q_in, other=0.0)
            delta = tl.load(Delta + statistics + q_at, mask=q_in, other=0.0)
            q_segment, q_state, q_limit = _query_attributes(Vis + batch * vis_b, q_at, q_in, T)
            seen = _visible(
                q_at[None, :], q_segment[None, :], q_state[None, :], q_limit[None, :],
                k_at[:, None], k_segment[:, None], k_position[:, None], k_state[:, None],
            )  # fmt: skip
            score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :]
            p = tl.exp2(tl.where(seen, score, float("-inf")))
            v_acc = tl.dot(p.to(g.dtype), g, v_acc, input_precision="ieee")
            s_grad = p * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta[None, :])
            k_acc = tl.dot(s_grad.to(q.dtype), q, k_acc, input_precision="ieee")
    KGrad += batch * kg_b + head * kg_h
    VGrad += batch * kg_b + head * kg_h
    k_grad = (k_acc * gradient_scale).to(KGrad.dtype.element_ty)
    tl.store(KGrad + k_at[:, None] * kg_t + d[None, :], k_grad, mask=k_in[:, None])
    tl.store(VGrad + k_at[:, None] * kg_t + d[None, :], v_acc.to(VGrad.dtype.element_ty), mask=k_in[:, None])
