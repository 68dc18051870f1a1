"""Configuration of the LLaDA2.x mixture-of-experts models, in the published layout of `config.json`."""

from transformers import PreTrainedConfig

from orl_core.errors import ConfigError

PUBLISHED_MASK_ID = 156895


class LLaDA2MoeConfig(PreTrainedConfig):
    """Fields of the published `llada2_moe` checkpoints, and four that their `config.json` leaves to the code:

    canvas_length: tokens of a block. state_family: always "masked". mask_token_id: id of [MASK]; if the key is missing,
    156895 where the vocabulary has it, as published. residual_intermediate_size: width of the residual adapter, 0 for a
    model without one.

    Raises ConfigError for settings that no published checkpoint uses and that this implementation does not compute.
    """

    model_type = "llada2_moe"

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int | None = None
    hidden_act: str = "silu"
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    use_bias: bool = False
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    rope_theta: float = 600000.0
    partial_rotary_factor: float = 0.5
    first_k_dense_replace: int = 1
    moe_intermediate_size: int = 512
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    score_function: str = "sigmoid"
    use_cache: bool = False
    output_router_logits: bool = False
    pad_token_id: int | None = 156892
    eos_token_id: int | list[int] | None = 156892
    canvas_length: int = 32
    state_family: str = "masked"
    mask_token_id: int | None = None
    residual_intermediate_size: int = 0

    def __post_init__(self, **kwargs) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.mask_token_id is None and self.vocab_size > PUBLISHED_MASK_ID:
            self.mask_token_id = PUBLISHED_MASK_ID
        if self.state_family != "masked":
            raise ConfigError(f"state_family is {self.state_family!r}; LLaDA2 models are 'masked'")
        if kwargs.pop("rope_scaling", None):
            raise ConfigError("rope_scaling is set; LLaDA2 checkpoints use plain rotary embeddings: remove the key")
        for key, unsupported in (("use_sliding_window", True), ("norm_head", True), ("use_rmsnorm", False)):
            if kwargs.get(key, not unsupported) == unsupported:
                raise ConfigError(f"{key} is {unsupported}; only {not unsupported} is implemented")
        if self.score_function != "sigmoid":
            raise ConfigError(f"score_function is {self.score_function!r}; only 'sigmoid' is implemented")
        if self.num_experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ConfigError(
                f"num_experts is {self.num_experts}, n_group {self.n_group}, topk_group {self.topk_group}; "
                "n_group must divide num_experts and topk_group lie in [1, n_group]"
            )
        super().__post_init__(**kwargs)

    @property
    def rotary_width(self) -> int:
        """How many of the first dimensions of a head are rotated."""
        assert self.head_dim is not None
        return int(self.head_dim * self.partial_rotary_factor)
