"""Train a ResNet on handwritten digits."""

import numpy as np
import optax
from flax import nnx

import resnet

EPOCHS, STEPS_PER_EPOCH = 6, 22

(images, labels), test = resnet.digits()
model = resnet.ResNet(rngs=nnx.Rngs(0))
schedule = optax.cosine_decay_schedule(1e-2, EPOCHS * STEPS_PER_EPOCH)
optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

for epoch in range(EPOCHS):
    order = np.random.default_rng([0, epoch]).permutation(len(images))
    for rows in resnet.batches(order, STEPS_PER_EPOCH):
        loss = resnet.train_step(model, optimizer, (images[rows], labels[rows]))
    resnet.log(f"epoch {epoch}: loss {loss:.3f}, test accuracy {resnet.accuracy(model, test):.1%}")
