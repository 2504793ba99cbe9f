def schema_regex(schema, *, name="json_schema", spaces=False):
    raise NotImplementedError


def json_mode_regex(*, spaces=False):
    raise NotImplementedError
