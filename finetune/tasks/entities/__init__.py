"""Named entities: a tag for every word, predicted at its first subword (Devlin et al. 2018, section 5.3)."""

from finetune.tasks.datasets.sentences import Sentence as Example
from finetune.tasks.entities.settings import EntitiesSettings
from finetune.tasks.entities.task import Entities

__all__ = ["Entities", "EntitiesSettings", "Example"]
