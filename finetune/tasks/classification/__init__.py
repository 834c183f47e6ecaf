"""Single texts and pairs to a class, a set of labels or a value; long texts as windows whose logits are averaged."""

from finetune.tasks.classification.settings import ClassificationSettings
from finetune.tasks.classification.task import Classification, Example

__all__ = ["Classification", "ClassificationSettings", "Example"]
