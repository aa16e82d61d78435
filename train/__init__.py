"""The training side of specjax: `specjax train RECIPE --config NAME_OR_FILE [field=value ...]`."""
