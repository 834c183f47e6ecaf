"""One fine-tuning: `config`, `runs` (checks, plan), `train` (on a worker), `model/`, `saved` (the model on disk)."""
