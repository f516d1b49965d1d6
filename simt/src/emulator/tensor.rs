//! `mma` and `ldmatrix` of a whole warp, on the fragments that `face/tensor.rs` draws.

/// The registers of one lane: its operands on the way in, its results on the way out.
pub type Registers = [u32; 10];

/// `d = a * b + c` for 16 x 8 x 16, products exact, summed in f32 in ascending `k`.
/// A lane's registers are a (4), b (2) and c (4); d replaces the first four.
pub fn multiply_accumulate(lanes: &mut [Registers; 32], decode: impl Fn(u32) -> f32) {
    let mut a = [[0f32; 16]; 16];
    let mut b = [[0f32; 8]; 16];
    let mut d = [[0f32; 8]; 16];
    for (lane, registers) in lanes.iter().enumerate() {
        let (row, column) = (lane / 4, lane % 4 * 2);
        for half in 0..2 {
            let value = |register: usize| decode(registers[register] >> (16 * half) & 0xffff);
            a[row][column + half] = value(0);
            a[row + 8][column + half] = value(1);
            a[row][column + 8 + half] = value(2);
            a[row + 8][column + 8 + half] = value(3);
            b[column + half][row] = value(4);
            b[column + 8 + half][row] = value(5);
            d[row][column + half] = f32::from_bits(registers[6 + half]);
            d[row + 8][column + half] = f32::from_bits(registers[8 + half]);
        }
    }
    for (a_row, d_row) in a.iter().zip(&mut d) {
        for (a, b_row) in a_row.iter().zip(&b) {
            for (d, b) in d_row.iter_mut().zip(b_row) {
                *d += a * b;
            }
        }
    }
    for (lane, registers) in lanes.iter_mut().enumerate() {
        let (row, column) = (lane / 4, lane % 4 * 2);
        for half in 0..2 {
            registers[half] = d[row][column + half].to_bits();
            registers[2 + half] = d[row + 8][column + half].to_bits();
        }
    }
}

/// The four results of every lane, from the 32 rows of 8 values (four matrices of 8 rows).
pub fn distribute(rows: &[[u16; 8]; 32], transposed: bool, lanes: &mut [Registers; 32]) {
    for (lane, registers) in lanes.iter_mut().enumerate() {
        let (row, column) = (lane / 4, lane % 4 * 2);
        for matrix in 0..4 {
            let value = |row: usize, column: usize| rows[8 * matrix + row][column] as u32;
            let (low, high) = match transposed {
                false => (value(row, column), value(row, column + 1)),
                true => (value(column, row), value(column + 1, row)),
            };
            registers[matrix] = low | high << 16;
        }
    }
}
