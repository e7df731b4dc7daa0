"""Train a ResNet on handwritten digits."""

import numpy as np
import optax
from flax import nnx

import jaxpar
import resnet

EPOCHS, STEPS_PER_EPOCH = 6, 22

jaxpar.init_process_group()
mesh = jaxpar.init_device_mesh((-1,), ("dp",))
(images, labels), test = resnet.digits()
sampler = jaxpar.data.DistributedSampler(len(images))
model = resnet.ResNet(rngs=nnx.Rngs(0))
model = jaxpar.ddp.DistributedDataParallel(jaxpar.ddp.convert_sync_batchnorm(model, mesh), mesh)
schedule = optax.cosine_decay_schedule(1e-2, EPOCHS * STEPS_PER_EPOCH)
optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
train_step = jaxpar.TrainStep(resnet.loss_fn, model, optimizer, mesh=mesh)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    order = np.array(list(sampler))
    for rows in resnet.batches(order, STEPS_PER_EPOCH):
        loss = train_step((images[rows], labels[rows]))["loss"]
    resnet.log(f"epoch {epoch}: loss {loss:.3f}, test accuracy {resnet.accuracy(model, test):.1%}")
