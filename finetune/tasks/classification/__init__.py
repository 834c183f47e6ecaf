"""Classification and regression of documents and pairs; long inputs are windows whose logits are averaged."""

from finetune.tasks.classification.settings import ClassificationSettings
from finetune.tasks.classification.task import Classification, Example

__all__ = ["Classification", "ClassificationSettings", "Example"]
