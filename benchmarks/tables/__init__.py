"""The tables of a suite's page: ``TABLES[kind] = (title, table of the rows of that kind)``."""

from . import cpu_peers, decoding, drafting, parts, quality, serving, small_caches, training

TABLES = {
    "decode": ("Plain and speculative decoding", decoding.decode),
    "peer": ("Beside other libraries", decoding.peers),
    "cpu peers": ("Beside the engines that people use on CPUs", cpu_peers.cpu_peers),
    "drafters": ("The embedded target on real text", decoding.drafters),
    "tables": ("Drafters without training on real text", decoding.tables),
    "quality": ("Approximate rules: quality and speed", quality.quality),
    "requests": ("Requests that are made twice", drafting.requests),
    "drafting": ("The time of drafting", drafting.drafting),
    "datastore": ("A large datastore", drafting.datastore),
    "long rounds": ("Rounds after a long context", small_caches.long_rounds),
    "drafting cost": ("The time of drafting by context", small_caches.drafting_cost),
    "budgets": ("Acceptance by what is seen", small_caches.budgets),
    "serving": ("Continuous batching", serving.serving),
    "regeneration": ("Text for training", serving.regeneration),
    "passes": ("A pass over N nodes", parts.passes),
    "buffers": ("The size of the buffer", parts.buffers),
    "bandwidth": ("Bandwidth", parts.bandwidth),
    "product": ("Products with M activations", parts.micro("M")),
    "attention": ("Attention over a cache, one layer", parts.micro("cached, N")),
    "training": ("The training step of EAGLE-3", training.training),
    "long context": ("EAGLE-3 beyond its trained context", training.long_context),
}
