"""The workloads in TensorFlow: plain variables, the loss of a batch, batches from memory."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from benchmarks.training.workloads import (
    FEATURE_ROWS,
    FEATURE_WIDTH,
    SEED,
    TABLE_ROWS,
    TABLE_WIDTH,
    WORKLOADS,
    Workload,
    make_examples,
)

tf: Any = importlib.import_module("tensorflow")

NUM_FEATURES = WORKLOADS["tables"].example_shape[0]
TABLES = {"sparse": [(TABLE_ROWS, TABLE_WIDTH)], "tables": [(FEATURE_ROWS, FEATURE_WIDTH)] * NUM_FEATURES}
LAYERS = {
    "cnn": [(3, 3, 1, 32), (32,), (5408, 64), (64,), (64, 10), (10,)],
    "dense": [(1024, 4096), (4096,), (4096, 4096), (4096,), (4096, 1024), (1024,), (1024, 10), (10,)],
    "sparse": [(TABLE_WIDTH, 10), (10,)],
    "tables": [(NUM_FEATURES * FEATURE_WIDTH, 10), (10,)],
}


def make_variables(workload: Workload) -> list[Any]:
    """Weights and biases, drawn as torch draws them: uniform within 1 / sqrt(fan in), tables first and normal."""
    random = np.random.default_rng(SEED)
    bound = 1.0
    variables = [
        tf.Variable(random.standard_normal(shape, dtype=np.float32)) for shape in TABLES.get(workload.name, [])
    ]
    for shape in LAYERS[workload.name]:
        if len(shape) > 1:
            bound = float(np.prod(shape[:-1])) ** -0.5
        value = random.uniform(-bound, bound, shape).astype(np.float32)
        variables.append(tf.Variable(value))
    return variables


def forward(workload: Workload, variables: list[Any], inputs: Any) -> Any:
    """Logits of a batch, ``(batch, 10)``."""
    if workload.name == "sparse":
        table, *variables = variables
        inputs = tf.reduce_sum(tf.nn.embedding_lookup(table, inputs), axis=1)
    if workload.name == "tables":
        tables, variables = variables[:NUM_FEATURES], variables[NUM_FEATURES:]
        rows = [tf.nn.embedding_lookup(table, inputs[:, column]) for column, table in enumerate(tables)]
        inputs = tf.concat(rows, axis=1)
    weights = [tf.convert_to_tensor(variable) for variable in variables]
    if workload.name == "cnn":
        inputs = tf.nn.relu(tf.nn.conv2d(inputs, weights[0], 1, "VALID") + weights[1])
        inputs = tf.reshape(tf.nn.max_pool2d(inputs, 2, 2, "VALID"), (-1, 5408))
        weights = weights[2:]
    for layer in range(0, len(weights) - 2, 2):
        inputs = tf.nn.relu(tf.linalg.matmul(inputs, weights[layer]) + weights[layer + 1])
    return tf.linalg.matmul(inputs, weights[-2]) + weights[-1]


def mean_loss(workload: Workload, variables: list[Any], inputs: Any, labels: Any) -> Any:
    """Cross entropy of a batch, its mean."""
    logits = forward(workload, variables, inputs)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def make_dataset(workload: Workload) -> Any:
    """Endless batches from memory, in TensorFlow's image layout."""
    inputs, labels = make_examples(workload, 32 * workload.batch_size)
    if workload.name == "cnn":
        inputs = inputs.transpose(0, 2, 3, 1)
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(workload.batch_size, drop_remainder=True)
    return data.cache().repeat().prefetch(2)
