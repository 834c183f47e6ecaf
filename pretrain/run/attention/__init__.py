"""What the heads attend to on average, recorded while a model trains; `pretrain/reporting/attention` shows it."""
