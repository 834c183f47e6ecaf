"""Statistics of the heads' attention, recorded while a model trains; `pretrain/reporting/attention` shows them."""
