"""Records statistics of the attention heads while a model trains; `pretrain/reporting/attention` shows them."""
