"""A speech recognizer from waveforms: `accelcheck check examples/models/speech.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def mel_filters(bins: int, mels: int, rate: int) -> torch.Tensor:
    """Returns triangular filters from frequencies to the mel scale."""
    frequency = torch.linspace(0, rate / 2, bins)
    top = 2595 * torch.log10(torch.tensor(1 + rate / 2 / 700))
    edge = 700 * (10 ** (torch.linspace(0, float(top), mels + 2) / 2595) - 1)
    rise = (frequency[:, None] - edge[:-2]) / (edge[1:-1] - edge[:-2])
    fall = (edge[2:] - frequency[:, None]) / (edge[2:] - edge[1:-1])
    return torch.minimum(rise, fall).clamp(min=0)


class LogMel(nn.Module):
    """Log-mel spectrogram of waveforms, normalized over time."""

    window: torch.Tensor
    filters: torch.Tensor

    def __init__(self, fft: int = 128, hop: int = 64, mels: int = 20, rate: int = 8000) -> None:
        super().__init__()
        self.fft, self.hop = fft, hop
        self.register_buffer("window", torch.hann_window(fft))
        self.register_buffer("filters", mel_filters(fft // 2 + 1, mels, rate))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(wave, self.fft, self.hop, window=self.window, return_complex=True)
        power = spectrum.abs() ** 2
        mel = torch.log(torch.matmul(power.transpose(1, 2), self.filters) + 1e-6)
        return (mel - mel.mean(1, keepdim=True)) / (mel.std(1, keepdim=True) + 1e-5)


class Recognizer(nn.Module):
    """Log-mel features, two convolutions, a bidirectional GRU, and log-probabilities of characters."""

    def __init__(self, characters: int = 29, width: int = 24) -> None:
        super().__init__()
        self.features = LogMel()
        self.conv = nn.Sequential(
            nn.Conv1d(20, width, 5, stride=2, padding=2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1),
        )  # fmt: skip
        self.rnn = nn.GRU(width, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * width, characters)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        h = self.conv(self.features(wave).transpose(1, 2)).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.head(h).log_softmax(-1)


def ctc(scores: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Returns the CTC loss of texts of one length."""
    frames = torch.full((len(scores),), scores.shape[1], dtype=torch.long)
    lengths = torch.full((len(text),), text.shape[1], dtype=torch.long)
    return functional.ctc_loss(scores.transpose(0, 1), text, frames, lengths)


def make() -> dict[str, Any]:
    """Returns the model with two batches of waveforms and texts."""
    batches = [(torch.randn(3, 2048) * 0.1, torch.randint(1, 29, (3, 5))) for _ in range(2)]
    return {"model": Recognizer(), "batches": batches, "loss": ctc, "optimizer": torch.optim.AdamW}
