"""What runs on a device, chosen once: number formats, attention's kernels, a table of operations.

`base` joins the three, which have packages of their own (`engine.formats`, `engine.attention`,
`engine.ops`); `create` chooses them. Here are also the layouts of rows at experts, how kernels are
launched, and the references of products and attention.
"""
