"""Tables of the TOML files of recipes."""


def model_table(name="model", hidden_size=16):
    """The table ``name`` of a tiny model."""
    return f"""[{name}]
hidden_size = {hidden_size}
intermediate_size = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
"""
