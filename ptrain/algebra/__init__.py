"""The product of the axes: is it legal?"""
