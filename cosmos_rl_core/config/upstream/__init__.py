"""cosmos-rl's settings, both schemas, as tables: what each key means in a recipe of ours."""
