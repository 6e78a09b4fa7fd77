"""A network of your own, a `Backbone`, and its settings, a `BackboneConfig`: `python -m examples.custom_backbone`.

unmask train examples.custom_recipe:tiny --out runs/gru --set backbone=examples.custom_backbone:GRUConfig
unmask sample runs/gru --allow-code"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from examples.custom_recipe import tiny, train
from unmask import Backbone, BackboneConfig, Vocab
from unmask.backbones.base import Capabilities


@dataclass(frozen=True)
class GRUConfig(BackboneConfig):
    width: int = 64
    max_length = None

    def build(self, vocab: Vocab) -> Backbone:
        return GRU(self.width, vocab)


class GRU(Backbone):
    capabilities, blocks, describe = Capabilities(), lambda self: [self.gru], lambda self: {"GRU": self.gru.hidden_size}

    def __init__(self, width: int, vocab: Vocab) -> None:
        super().__init__()
        self.table, self.lm_head = nn.Embedding(vocab.size, width), nn.Linear(width, vocab.size)
        self.gru = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)

    def encode(self, h: Tensor, t: Tensor, positions: Tensor | None = None, context: object = None) -> Tensor:
        return self.gru(h)[0] if positions is None else self.gru(h)[0][positions]


if __name__ == "__main__":
    print(train(replace(tiny(), backbone=GRUConfig(width=32))).sample(length=24).text)
