"""What the tests of losses share."""

from __future__ import annotations

from torch import nn

N = 24


CE, SUM = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")
