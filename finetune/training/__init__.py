"""One fine-tuning: `config`, `runs` (checks and plan), `train` (on a worker), `model/`, `saved` (the model on disk)."""
