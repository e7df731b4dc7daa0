"""A small ResNet with BatchNorm in plain Flax NNX, and scikit-learn's handwritten digits; no jaxpar in here.

    images [B, 8, 8, 1] -> stem -> block 16 -> block 32, half size -> mean -> logits [B, 10]

`resnet_single.py` trains it on one device, `train_resnet.py` on many.
"""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Batch: TypeAlias = tuple[np.ndarray, np.ndarray]


class Block(nnx.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut around them."""

    def __init__(self, width_in: int, width: int, *, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1 = conv(width_in, width, size=3, stride=stride, rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.conv2 = conv(width, width, size=3, rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, momentum=0.9, scale_init=nnx.initializers.zeros, rngs=rngs)
        changes = stride != 1 or width_in != width
        self.shortcut = conv(width_in, width, size=1, stride=stride, rngs=rngs) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """Images f32[B, 8, 8, 1] to logits f32[B, 10]."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.stem = conv(1, 16, size=3, rngs=rngs)
        self.blocks = nnx.List(
            [
                Block(16, 16, stride=1, rngs=rngs),
                Block(16, 32, stride=2, rngs=rngs),
            ]
        )
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images: jax.Array | np.ndarray) -> jax.Array:
        x = self.stem(jnp.asarray(images))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def conv(width_in: int, width: int, *, size: int, stride: int = 1, rngs: nnx.Rngs) -> nnx.Conv:
    """A convolution without bias, as BatchNorm follows."""
    return nnx.Conv(
        width_in, width, (size, size), strides=stride, use_bias=False, kernel_init=he_normal, rngs=rngs
    )


def he_normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """He's initialisation, which keeps the scale of activations through ReLUs.

    Drawn as one row and then shaped: XLA:CPU takes up to 20 s to compile a random draw of shape (3, 3, 16, 16).
    """
    fan_in = math.prod(shape[:-1])
    return jax.random.normal(key, (math.prod(shape),), dtype).reshape(shape) * (2 / fan_in) ** 0.5


def digits() -> tuple[Batch, Batch]:
    """Training and test set, 1408 and 389 images in [0, 1] with their labels; the split is always the same."""
    pixels, labels = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8, 1) / 16
    labels = np.asarray(labels, np.int32)
    train, test = train_test_split(np.arange(len(labels)), train_size=1408, random_state=0, stratify=labels)
    return (images[train], labels[train]), (images[test], labels[test])


def batches(order: np.ndarray, num_batches: int) -> np.ndarray:
    """Cut an epoch's order of samples into equal batches [num_batches, n], leaving out what does not divide."""
    return order[: len(order) // num_batches * num_batches].reshape(num_batches, -1)


def loss_fn(model: ResNet, batch: Batch) -> jax.Array:
    """Mean cross-entropy of a batch (images, labels)."""
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def train_step(model: ResNet, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """The usual step on one device: updates model and optimizer in place, returns the loss."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model: ResNet, batch: Batch) -> jax.Array:
    """Share of right answers, with BatchNorm's running statistics."""
    images, labels = batch
    model = nnx.view(model, use_running_average=True)
    return jnp.mean(model(images).argmax(-1) == labels)


def log(text: str) -> None:
    """Print once, however many processes run."""
    if jax.process_index() == 0:
        print(text, flush=True)
