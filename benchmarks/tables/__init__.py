"""The tables of a suite's page: ``TABLES[kind] = (title, table of the rows of that kind)``."""

from . import cpu_peers, decoding, drafting, parts, quality, self_drafting, serving, training

TABLES = {
    "decode": ("Plain and speculative decoding", decoding.decode),
    "peer": ("Beside other libraries", decoding.peers),
    "cpu peers": ("Beside the engines that people use on CPUs", cpu_peers.cpu_peers),
    "drafters": ("The embedded target on real text", decoding.drafters),
    "tables": ("Drafters without training on real text", decoding.tables),
    "quality": ("Approximate rules: quality and speed", quality.quality),
    "early exits": ("Early exits", self_drafting.early_exits),
    "skip search": ("A searched set of skipped sublayers", self_drafting.skip_search),
    "resumed pass": ("The pass that goes on at a layer", self_drafting.resumed_pass),
    "part memory": ("Memory of a part that drafts", self_drafting.part_memory),
    "schedules": ("PPD and SPEED", self_drafting.schedules),
    "requests": ("Requests that are made twice", drafting.requests),
    "drafting": ("The time of drafting", drafting.drafting),
    "datastore": ("A large datastore", drafting.datastore),
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
